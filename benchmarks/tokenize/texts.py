"""The texts that encoding is measured and checked on: prose, code and many languages.

They are from the folder of public test data (`GRISTMILL_BENCH_DATA`, or `../shared/data` beside the repository); code
is this Python's standard library everywhere.
"""

from __future__ import annotations

import io
import json
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkout import data_folder
from benchmarks.installed_texts import documentation

DOCUMENT_CHARACTERS = 8000
TEXT_BYTES = 20_000_000
DOCUMENTATION_PIECES = 15_000


def books() -> list[str]:
    """English prose: books; documentation of installed packages where the public data is not here."""
    folder = _data()
    if folder is None:
        return first_texts(documentation(DOCUMENTATION_PIECES), 2 * TEXT_BYTES)
    import zstandard

    with (folder / "text" / "books.jsonl.zst").open("rb") as stream:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(stream), encoding="utf-8")
        return _pieces([json.loads(line)["text"] for line in lines])


def code() -> list[str]:
    """This Python's standard library."""
    return _pieces([path.read_text(encoding="utf-8", errors="ignore") for path in _modules()])


def languages() -> list[str]:
    """The declaration of human rights in hundreds of languages, each in two halves; none without the public data."""
    texts = [*declarations().values()]
    # Every language is in both halves of what is measured.
    return [text[: len(text) // 2] for text in texts] + [text[len(text) // 2 :] for text in texts]


def declarations() -> dict[str, str]:
    """The declaration of human rights by language; those without spaces (Thai, Chinese, Japanese) among them."""
    folder = _data()
    if folder is None:
        return {}
    with zipfile.ZipFile(folder / "langid" / "udhr2.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        texts = {Path(name).stem: archive.read(name).decode("utf-8", "ignore") for name in names}
    return {name: text for name, text in texts.items() if text.strip()}  # one of the files is empty


def _modules() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))


def _data() -> Path | None:
    return folder if (folder := data_folder()).exists() else None


def _pieces(texts: Sequence[str]) -> list[str]:
    """Documents of a few kilobytes, in an order that mixes the texts; TEXT_BYTES of them."""
    pieces = [text[at : at + DOCUMENT_CHARACTERS] for text in texts for at in range(0, len(text), DOCUMENT_CHARACTERS)]
    return first_texts([piece for start in range(7) for piece in pieces[start::7]], 2 * TEXT_BYTES)


def first_texts(texts: Sequence[str], most_bytes: int) -> list[str]:
    """As many texts as have so many bytes together."""
    found, size = [], 0
    for text in texts:
        found.append(text)
        size += len(text.encode())
        if size >= most_bytes:
            break
    return found


def text_bytes(texts: Sequence[str]) -> int:
    """Bytes of UTF-8."""
    return sum(len(text.encode()) for text in texts)
