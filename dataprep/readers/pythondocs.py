"""Text that every machine with Python has: sources of the demo that need no download.

`python-docs://` is prose: topics of the language reference, docstrings of the standard
library, and descriptions and licences of the installed distributions (real
near-duplicates). `python-stdlib://` is code: the files of the standard library. The
content depends only on the interpreter and the installed distributions.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TypedDict, TypeVar

from gristmill.dataprep.examples.conversations import Example, Message

T = TypeVar("T")
DOCS = "python-docs://"
STDLIB = "python-stdlib://"
CONTENT_VERSION = 1
"""Raised when the same interpreter and distributions yield other documents."""
MIN_CHARACTERS = 200
"""Shortest document; most shorter ones are a single sentence."""
LONG_DOCSTRING_CHARACTERS = 1500
"""A docstring of this length is a document; shorter ones are sections of their module's
document.
"""
MAX_CODE_BYTES = 300_000
"""Largest file; larger ones of the standard library are generated tables."""
_OWN_NAME = "gristmill"
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


@dataclass(frozen=True)
class PythonDocument:
    """A document, or an error in its place."""

    locator: str
    text: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


def is_python_source(path: str) -> bool:
    """True if a source's path is served by this module."""
    return path in (DOCS, STDLIB)


def python_parts(path: str) -> list[str]:
    """Parts of a Python source, sorted; they replace files."""
    return sorted(_PARTS[path])


def python_documents(path: str, part: str) -> Iterator[PythonDocument]:
    """Documents of one part of `python-docs://` or `python-stdlib://`, in a fixed
    order; texts below MIN_CHARACTERS are left out.
    """
    for locator, text, about in _PARTS[path][part]():
        if isinstance(text, Exception):
            form = "UTF-8" if locator.startswith("dist/") else "Python"
            yield PythonDocument(locator, "", error=f"not valid {form}: {text}")
        elif len(text) >= MIN_CHARACTERS:
            yield PythonDocument(locator, text, about)


class ListedFile(TypedDict):
    """Fingerprint of a file of a source, or of a part of it.

    Attributes:
        path: relative to the source.
        size: in bytes.
        stamp: modification time, etag or hash, which changes with the content.
    """

    path: str
    size: int
    stamp: str


def python_listing(path: str, verify: bool) -> list[ListedFile]:
    """Fingerprint of the content: interpreter and distributions, or with `verify` the
    hash of every part.
    """
    listing: list[ListedFile] = []
    for part in python_parts(path) if verify else ():
        digest = hashlib.sha256()
        size = 0
        for document in python_documents(path, part):
            for content in (document.locator, document.text, document.error):
                encoded = content.encode("utf-8", "surrogatepass")
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
                size += len(encoded)
        stamp = f"sha256:{digest.hexdigest()}"
        listing.append({"path": part, "size": size, "stamp": stamp})
    if verify:
        return listing
    entries = [("documents", str(CONTENT_VERSION)), ("python", sys.version)]
    if path == DOCS:
        entries += [
            (f"dist/{name}", distribution.version)
            for name, distribution in installed_distributions()
        ]
    return [
        {"path": name, "size": 0, "stamp": stamp} for name, stamp in sorted(entries)
    ]


def installed_distributions() -> list[tuple[str, metadata.Distribution]]:
    """Installed distributions by normalised name (PEP 503), sorted, without
    gristmill.
    """
    paths = sysconfig.get_paths()
    distributions: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions(
        path=sorted({paths["purelib"], paths["platlib"]})
    ):
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name and name != _OWN_NAME:
            distributions.setdefault(name, distribution)
    return sorted(distributions.items())


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


def read_code(path: Path) -> str:
    """Text of a Python file, in its declared encoding.

    Raises:
        SyntaxError, UnicodeDecodeError: the file is invalid in its declared encoding.
    """
    with tokenize.open(path) as stream:
        return stream.read()


def docstrings(
    name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[str, str, str]]:
    """Docstrings of a module and its classes and functions: (name, signature,
    docstring), in source order.
    """
    text = ast.get_docstring(node)
    if isinstance(node, ast.Module | ast.ClassDef):
        signature, children = "", node.body
    else:
        signature, children = f"({ast.unparse(node.args)})", []
    if text:
        yield name, signature, text
    for child in children:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings(f"{name}.{child.name}", child)


def module_name(relative: str) -> str:
    """`json/decoder.py` is `json.decoder`, `json/__init__.py` is `json`."""
    return relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


_Text = tuple[str, str | Exception, Mapping[str, str]]
"""Locator, text or error, and metadata of a document."""


def _try(read: Callable[..., T], *arguments: object) -> T | Exception:
    """Call a function that reads a file; errors of its content are returned."""
    try:
        return read(*arguments)
    except (SyntaxError, ValueError) as error:
        return error


def _topics() -> Iterator[_Text]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions of Python lack it
        return
    for name in sorted(topics):
        yield f"topics/{name}", inspect.cleandoc(topics[name]), {}


def _library_docstrings(module: str, path: Path) -> list[tuple[str, str, str]]:
    return list(docstrings(module, ast.parse(read_code(path))))


def _module_docs() -> Iterator[_Text]:
    for relative, path in standard_library_files():
        module = module_name(relative)
        entries = _try(_library_docstrings, module, path)
        if isinstance(entries, Exception):
            yield f"stdlib/{relative}", entries, {}
            continue
        sections = []
        for name, signature, text in entries:
            section = f"{name}{signature}\n\n{text}"
            if name != module and len(text) >= LONG_DOCSTRING_CHARACTERS:
                inner = name.removeprefix(f"{module}.")
                yield f"stdlib/{relative}:{inner}", section, {}
            else:
                sections.append(section)
        yield f"stdlib/{relative}", "\n\n\n".join(sections), {}


def _description(distribution: metadata.Distribution) -> str:
    # Parsed here, as an import of the package importlib_metadata changes the result of
    # `.metadata`.
    message = email.message_from_string(distribution.read_text("METADATA") or "")
    return str(message.get_payload() or "")


def _distribution_docs() -> Iterator[_Text]:
    for name, distribution in installed_distributions():
        about = {"version": distribution.version}
        yield f"dist/{name}/METADATA", _try(_description, distribution), about
        for file in sorted(distribution.files or [], key=str):
            _, inside, relative_path = str(file).partition(".dist-info/")
            path = Path(str(file.locate()))
            if inside and _LICENCE_NAME.search(file.name) and path.is_file():
                locator = f"dist/{name}/{relative_path}"
                yield locator, _try(path.read_text, "utf-8"), about


def _standard_library_code() -> Iterator[_Text]:
    for relative, path in standard_library_files():
        text = _try(read_code, path)
        if isinstance(text, Exception) or not _GENERATED.search(text[:500]):
            yield f"stdlib/{relative}", text, {}


_PARTS: dict[str, dict[str, Callable[[], Iterator[_Text]]]] = {
    DOCS: {
        "distributions": _distribution_docs,
        "docstrings": _module_docs,
        "topics": _topics,
    },
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
    for relative, path in standard_library_files():
        module = module_name(relative)
        entries = _try(_library_docstrings, module, path)
        # reading python-docs:// as a source reports errors
        for name, signature, text in () if isinstance(entries, Exception) else entries:
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
