"""Text that is on every machine with Python: the sources of the demo, which need no download.

`python-docs://` is prose: the language reference's topics, the docstrings of the standard library, and the
descriptions and licences of the installed distributions (real near-duplicates). `python-stdlib://` is code: the
files of the standard library. What comes out depends on the interpreter and on what is installed, nothing else.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

DOCS = "python-docs://"
STDLIB = "python-stdlib://"
CONTENT_VERSION = 1
"""Raised when the same interpreter and distributions give other documents."""
MIN_CHARACTERS = 200
"""Shorter documents are left out: most are a single sentence."""
LONG_DOCSTRING_CHARACTERS = 1500
"""A docstring of this length is a document of its own, not a paragraph of its module's."""
MAX_CODE_BYTES = 300_000
"""Longer files of the standard library are generated tables."""
_OWN_NAME = "gristmill"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_GENERATED = re.compile(r"\bgenerated (from|by|automatically)|automatically generated", re.IGNORECASE)
_LICENCE_NAME = re.compile(r"licen[cs]e|copying|notice", re.IGNORECASE)


@dataclass(frozen=True)
class PythonDocument:
    """A document, or (where `error` is set) what could not be made into one."""

    locator: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def is_python_source(path: str) -> bool:
    """Whether a source's path is one of the two that this module serves."""
    return path in (DOCS, STDLIB)


def python_parts(path: str) -> list[str]:
    """The parts that a Python source is read in, sorted; they take the place of files."""
    return sorted(_PARTS[path])


def python_documents(path: str, part: str) -> Iterator[PythonDocument]:
    """The documents of one part of `python-docs://` or `python-stdlib://`, in a fixed order."""
    return _PARTS[path][part]()


def python_listing(path: str, verify: bool) -> list[dict[str, Any]]:
    """What identifies the content: interpreter and distributions, or with `verify` the hash of every part."""
    if verify:
        return [_hashed(path, part) for part in python_parts(path)]
    entries = [("documents", str(CONTENT_VERSION)), ("python", sys.version)]
    if path == DOCS:
        entries += [(f"dist/{name}", found.version) for name, found in installed_distributions()]
    return [{"path": name, "size": 0, "stamp": stamp} for name, stamp in sorted(entries)]


def _hashed(path: str, part: str) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    for document in python_documents(path, part):
        for content in (document.locator, document.text, document.error):
            encoded = content.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
            size += len(encoded)
    return {"path": part, "size": size, "stamp": f"sha256:{digest.hexdigest()}"}


def installed_distributions() -> list[tuple[str, metadata.Distribution]]:
    """The installed distributions by normalised name (PEP 503), sorted; never gristmill itself."""
    paths = sysconfig.get_paths()
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions(path=sorted({paths["purelib"], paths["platlib"]})):
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name and name != _OWN_NAME:
            found.setdefault(name, distribution)
    return sorted(found.items())


def standard_library_files() -> list[tuple[str, Path]]:
    """The standard library's own modules by path relative to it, sorted; without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]) and path.stat().st_size <= MAX_CODE_BYTES:
            files.append((relative.as_posix(), path))
    return sorted(files)


def read_code(path: Path) -> str:
    """A Python file's text, in the encoding that it declares.

    Raises:
        SyntaxError, UnicodeDecodeError: it does not follow its own encoding.
    """
    with tokenize.open(path) as stream:
        return stream.read()


def docstrings(module: str, tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """The docstrings of a module and its classes and functions: (name, signature, docstring), in order of the text."""
    own = ast.get_docstring(tree)
    if own:
        yield module, "", own
    yield from _member_docstrings(module, tree.body)


def _member_docstrings(prefix: str, body: list[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{prefix}.{node.name}"
        text = ast.get_docstring(node)
        signature = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
        if text:
            yield name, signature, text
        if isinstance(node, ast.ClassDef):
            yield from _member_docstrings(name, node.body)


def module_name(relative: str) -> str:
    """`json/decoder.py` is `json.decoder`, `json/__init__.py` is `json`."""
    return relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _topics() -> Iterator[PythonDocument]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions of Python leave it out
        return
    for name in sorted(topics):
        yield from _long_enough(f"topics/{name}", inspect.cleandoc(topics[name]), {})


def _module_docs() -> Iterator[PythonDocument]:
    for relative, path in standard_library_files():
        module = module_name(relative)
        try:
            found = list(docstrings(module, ast.parse(read_code(path))))
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            yield PythonDocument(f"stdlib/{relative}", "", error=f"not valid Python: {error}")
            continue
        sections = []
        for name, signature, text in found:
            section = f"{name}{signature}\n\n{text}"
            if name != module and len(text) >= LONG_DOCSTRING_CHARACTERS:
                yield PythonDocument(f"stdlib/{relative}:{name.removeprefix(module + '.')}", section)
            else:
                sections.append(section)
        yield from _long_enough(f"stdlib/{relative}", "\n\n\n".join(sections), {})


def _distribution_docs() -> Iterator[PythonDocument]:
    for name, distribution in installed_distributions():
        about = {"version": distribution.version}
        try:
            # Parsed here: the package importlib_metadata, once anybody imports it, replaces what `.metadata` gives.
            payload = email.message_from_string(distribution.read_text("METADATA") or "").get_payload()
        except UnicodeDecodeError as error:
            yield PythonDocument(f"dist/{name}/METADATA", "", error=f"not valid UTF-8: {error}")
        else:
            yield from _long_enough(f"dist/{name}/METADATA", str(payload or ""), about)
        yield from _licences(name, distribution, about)


def _licences(name: str, distribution: metadata.Distribution, about: dict[str, Any]) -> Iterator[PythonDocument]:
    for file in sorted(distribution.files or [], key=str):
        _, inside, rest = str(file).partition(".dist-info/")
        path = Path(str(file.locate()))
        if not inside or not _LICENCE_NAME.search(file.name) or not path.is_file():
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            yield PythonDocument(f"dist/{name}/{rest}", "", error=f"not valid UTF-8: {error}")
            continue
        yield from _long_enough(f"dist/{name}/{rest}", text, about)


def _standard_library_code() -> Iterator[PythonDocument]:
    for relative, path in standard_library_files():
        try:
            text = read_code(path)
        except (SyntaxError, UnicodeDecodeError) as error:
            yield PythonDocument(f"stdlib/{relative}", "", error=f"not valid Python: {error}")
            continue
        if not _GENERATED.search(text[:500]):
            yield from _long_enough(f"stdlib/{relative}", text, {})


def _long_enough(locator: str, text: str, about: dict[str, Any]) -> Iterator[PythonDocument]:
    if len(text) >= MIN_CHARACTERS:
        yield PythonDocument(locator, text, about)


_PARTS: dict[str, dict[str, Callable[[], Iterator[PythonDocument]]]] = {
    DOCS: {"distributions": _distribution_docs, "docstrings": _module_docs, "topics": _topics},
    STDLIB: {"code": _standard_library_code},
}


QUESTIONS_VERSION = 1
"""Raised when the same docstrings give other examples."""
MIN_ANSWER_CHARACTERS = 20
MAX_ANSWER_CHARACTERS = 400
"""Answers are short, so that they fit into the sequences of tiny models."""
PHRASINGS = (
    "What does the {kind} {name} do?",
    "What is the {kind} {name} for?",
    "Explain the {kind} {name}.",
    "Describe {name}.",
)


def questions() -> list[dict[str, Any]]:
    """SFT examples without ids: a question about a name of the standard library, its docstring's first paragraph."""
    return [{"messages": [_user(question), _assistant(answer)]} for question, answer in _pairs()]


def preferences() -> list[dict[str, Any]]:
    """DPO examples without ids: the rejected answer is the true one to another question."""
    pairs = _pairs()
    answers = sorted({answer for _, answer in pairs})
    if len(answers) < 2:
        return []
    examples = []
    for question, answer in pairs:
        number = _hash("rejected", question) % len(answers)
        rejected = answers[number] if answers[number] != answer else answers[number - 1]
        examples.append(
            {"prompt": [_user(question)], "chosen": [_assistant(answer)], "rejected": [_assistant(rejected)]}
        )
    return examples


def _pairs() -> list[tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for name, kind, text in _public_docstrings():
        answer = " ".join(text.split("\n\n")[0].split())
        if MIN_ANSWER_CHARACTERS <= len(answer) <= MAX_ANSWER_CHARACTERS:
            phrasing = PHRASINGS[_hash("phrasing", name) % len(PHRASINGS)]
            found.setdefault(name, (phrasing.format(kind=kind, name=name), answer))
    return list(found.values())


def _public_docstrings() -> Iterator[tuple[str, str, str]]:
    for relative, path in standard_library_files():
        module = module_name(relative)
        try:
            tree = ast.parse(read_code(path))
        except (SyntaxError, ValueError):  # not Python; reading python-docs:// as a source reports it
            continue
        for name, signature, text in docstrings(module, tree):
            if not any(part.startswith("_") for part in name.split(".")):
                kind = "module" if name == module else "function" if signature else "class"
                yield name, kind, text


def _hash(purpose: str, text: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{purpose}\0{text}".encode(), digest_size=8).digest(), "little")


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}
