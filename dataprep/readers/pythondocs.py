"""Text that every machine with Python has: sources of the demo that need no download.

`python-docs://` is prose: topics of the language reference, docstrings of the standard
library, and descriptions and licences of the packages that gristmill requires (real
near-duplicates). `python-docstrings://` is prose of one kind: docstrings of NumPy and
SciPy, one document each. `python-stdlib://` is code: the files of the standard library.
The content depends only on the versions of the interpreter and of these packages.
"""

from __future__ import annotations

import ast
import email
import hashlib
import inspect
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NotRequired, TypedDict

from gristmill.dataprep.examples.conversations import Example, Message

DOCS = "python-docs://"
DOCSTRINGS = "python-docstrings://"
STDLIB = "python-stdlib://"
CONTENT_VERSION = 2
"""Raised when the same interpreter and packages yield other documents."""
PACKAGES = (
    "apache-beam awkward cloudpickle datasketch duckdb fastwarc fsspec ftfy gigatoken httpx "
    "idna jinja2 jsonschema lxml-html-clean numba numpy orjson psutil pyarrow "
    "pydantic pyyaml resiliparse rich safetensors scipy tld tokenizers trafilatura typer "
    "typing-extensions universal-pathlib zstandard"
).split()
"""Packages with documents, all of which gristmill requires on every platform."""
DOCUMENTED = ("numpy", "scipy")
"""Packages with a document for each docstring."""
MIN_CHARACTERS = 200
"""Shortest document; most shorter ones are a single sentence."""
LONG_DOCSTRING_CHARACTERS = 1500
"""A docstring of this length is a document; shorter ones are sections of their module's
document.
"""
MAX_CODE_BYTES = 300_000
"""Largest file; larger ones of the standard library are generated tables."""
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
}
_GENERATED = re.compile(
    r"\bgenerated (from|by|automatically)|automatically generated", re.IGNORECASE
)
_LICENCE_NAME = re.compile(r"licen[cs]e|copying|notice", re.IGNORECASE)

PythonDocument = tuple[str, str, Mapping[str, str]]
"""Locator, text and metadata of a document."""


class ListedFile(TypedDict):
    """Fingerprint of a file of a source, or of a part of it.

    Attributes:
        path: relative to the source.
        size: in bytes.
        stamp: modification time, etag or hash, which changes with the content.
        licence: of its folder, if that states one.
    """

    path: str
    size: int
    stamp: str
    licence: NotRequired[str]


def is_python_source(path: str) -> bool:
    """True if a source's path is served by this module."""
    return path in _PARTS


def python_parts(path: str) -> list[str]:
    """Parts of a Python source, sorted; they replace files."""
    return sorted(_PARTS[path])


def python_documents(path: str, part: str) -> Iterator[PythonDocument]:
    """Documents of one part of a Python source, in a fixed order; texts below
    MIN_CHARACTERS are left out.
    """
    for document in _PARTS[path][part]():
        _, text, _ = document
        if len(text) >= MIN_CHARACTERS:
            yield document


def python_listing(path: str) -> list[ListedFile]:
    """Fingerprint of the content: versions of the interpreter and the packages."""
    stamps = {"documents": f"version {CONTENT_VERSION}", "python": sys.version}
    packages = {DOCS: PACKAGES, DOCSTRINGS: DOCUMENTED}.get(path, ())
    stamps |= {f"dist/{name}": metadata.version(name) for name in packages}
    return [
        {"path": name, "size": 0, "stamp": stamp}
        for name, stamp in sorted(stamps.items())
    ]


def standard_library_files() -> list[tuple[str, Path]]:
    """Modules of the standard library by relative path, sorted, without tests and
    generated tables.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if (
            _SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1])
            and path.stat().st_size <= MAX_CODE_BYTES
        ):
            files.append((relative.as_posix(), path))
    return sorted(files)


def _read_code(path: Path) -> str:
    with tokenize.open(path) as stream:  # in its declared encoding
        return stream.read()


def _docstrings(
    name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[str, str, str]]:
    """Yield name, signature and docstring of a module and its classes and functions."""
    text = ast.get_docstring(node)
    if isinstance(node, ast.Module | ast.ClassDef):
        signature, children = "", node.body
    else:
        signature, children = f"({ast.unparse(node.args)})", []
    if text:
        yield name, signature, text
    for child in children:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(f"{name}.{child.name}", child)


def _modules() -> Iterator[tuple[str, str, list[tuple[str, str, str]]]]:
    """Yield relative path, name and docstrings of each module: `json/decoder.py` is
    `json.decoder`, `json/__init__.py` is `json`.
    """
    for relative, path in standard_library_files():
        stem = relative.removesuffix(".py").removesuffix("/__init__")
        module = stem.replace("/", ".")
        yield relative, module, list(_docstrings(module, ast.parse(_read_code(path))))


def _topics() -> Iterator[PythonDocument]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions of Python lack it
        return
    for name in sorted(topics):
        yield f"topics/{name}", inspect.cleandoc(topics[name]), {}


def _module_docs() -> Iterator[PythonDocument]:
    for relative, module, entries in _modules():
        sections = []
        for name, signature, text in entries:
            section = f"{name}{signature}\n\n{text}"
            if name != module and len(text) >= LONG_DOCSTRING_CHARACTERS:
                inner = name.removeprefix(f"{module}.")
                yield f"stdlib/{relative}:{inner}", section, {}
            else:
                sections.append(section)
        yield f"stdlib/{relative}", "\n\n\n".join(sections), {}


def _package_docs() -> Iterator[PythonDocument]:
    for name in PACKAGES:
        package = metadata.distribution(name)
        about = {"version": package.version}
        # Parsed here, as an import of the package importlib_metadata changes the result
        # of `.metadata`.
        message = email.message_from_string(package.read_text("METADATA") or "")
        yield f"dist/{name}/METADATA", str(message.get_payload() or ""), about
        for file in sorted(package.files or [], key=str):
            _, inside, relative_path = str(file).partition(".dist-info/")
            path = Path(str(file.locate()))
            if inside and _LICENCE_NAME.search(file.name) and path.is_file():
                text = path.read_text("utf-8", "replace")
                yield f"dist/{name}/{relative_path}", text, about


def _package_docstrings() -> Iterator[PythonDocument]:
    for package in DOCUMENTED:
        folder = Path(str(metadata.distribution(package).locate_file(package)))
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder.parent)
            if not _SKIPPED_FOLDERS.isdisjoint(relative.parts):
                continue
            for name, signature, text in _docstrings("", ast.parse(_read_code(path))):
                title = f"{name.rpartition('.')[2]}{signature}".strip()
                yield f"{relative.as_posix()}:{name[1:]}", f"{title}\n\n{text}", {}


def _standard_library_code() -> Iterator[PythonDocument]:
    for relative, path in standard_library_files():
        text = _read_code(path)
        if not _GENERATED.search(text[:500]):
            yield f"stdlib/{relative}", text, {}


_PARTS = {
    DOCS: {
        "distributions": _package_docs,
        "docstrings": _module_docs,
        "topics": _topics,
    },
    DOCSTRINGS: {"docstrings": _package_docstrings},
    STDLIB: {"code": _standard_library_code},
}


QUESTIONS_VERSION = 1
"""Raised when the same docstrings yield other examples."""
MIN_ANSWER_CHARACTERS = 20
MAX_ANSWER_CHARACTERS = 400
"""Longest answer, so that examples fit the sequences of tiny models."""
PHRASINGS = (
    "What does the {kind} {name} do?",
    "What is the {kind} {name} for?",
    "Explain the {kind} {name}.",
    "Describe {name}.",
)


def questions() -> list[Example]:
    """SFT examples without ids: a question about a name of the standard library, and
    the first paragraph of its docstring.
    """
    return [
        {"messages": [_user(question), _assistant(answer)]}
        for question, answer in _pairs()
    ]


def preferences() -> list[Example]:
    """DPO examples without ids: the rejected answer belongs to another question."""
    pairs = _pairs()
    answers = sorted({answer for _, answer in pairs})
    if len(answers) < 2:
        return []
    examples: list[Example] = []
    for question, answer in pairs:
        number = _hash("rejected", question) % len(answers)
        rejected = answers[number] if answers[number] != answer else answers[number - 1]
        examples.append(
            {
                "prompt": [_user(question)],
                "chosen": [_assistant(answer)],
                "rejected": [_assistant(rejected)],
            }
        )
    return examples


def _pairs() -> list[tuple[str, str]]:
    pairs_by_name: dict[str, tuple[str, str]] = {}
    for _, module, entries in _modules():
        for name, signature, text in entries:
            answer = " ".join(text.split("\n\n")[0].split())
            is_public = not any(part.startswith("_") for part in name.split("."))
            if (
                is_public
                and MIN_ANSWER_CHARACTERS <= len(answer) <= MAX_ANSWER_CHARACTERS
            ):
                kind = "function" if signature else "class"
                kind = "module" if name == module else kind
                phrasing = PHRASINGS[_hash("phrasing", name) % len(PHRASINGS)]
                question = phrasing.format(kind=kind, name=name)
                pairs_by_name.setdefault(name, (question, answer))
    return list(pairs_by_name.values())


def _hash(purpose: str, text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(f"{purpose}\0{text}".encode(), digest_size=8).digest(), "little"
    )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
