"""Texts for measurements and checks of encoding: prose, code and many languages.

They are in `checkout.data_folder`, except code, which is this Python's standard
library.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkout import data_folder
from benchmarks.installed_texts import documentation
from benchmarks.public_data import read_archive, read_records

DOCUMENT_CHARACTERS = 8000
TEXT_BYTES = 20_000_000
DOCUMENTATION_PIECES = 15_000


def books() -> list[str]:
    """Return English prose: books; documentation of installed packages if the public
    data is not on this machine.
    """
    path = data_folder() / "text" / "books.jsonl.zst"
    if not path.exists():
        return first_texts(documentation(DOCUMENTATION_PIECES), 2 * TEXT_BYTES)
    return _pieces([record["text"] for record in read_records(path)])


def code() -> list[str]:
    """Return this Python's standard library."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    return _pieces(
        [path.read_text(encoding="utf-8", errors="ignore") for path in modules]
    )


def languages() -> list[str]:
    """Return the declaration of human rights in hundreds of languages, in two halves;
    nothing without the data.
    """
    texts = [*declarations().values()]
    # Every language is in both halves of what is measured.
    return [text[: len(text) // 2] for text in texts] + [
        text[len(text) // 2 :] for text in texts
    ]


def declarations() -> dict[str, str]:
    """Return the declaration of human rights by language, including those without
    spaces (Thai, Chinese, Japanese).
    """
    path = data_folder() / "langid" / "udhr2.zip"
    if not path.exists():
        return {}
    # One of the files is empty.
    return {
        Path(name).stem: text
        for name, text in read_archive(path).items()
        if text.strip()
    }


def _pieces(texts: Sequence[str]) -> list[str]:
    """Cut texts into documents of a few kilobytes, in an order that mixes them; returns
    2 * TEXT_BYTES.
    """
    pieces = [
        text[start : start + DOCUMENT_CHARACTERS]
        for text in texts
        for start in range(0, len(text), DOCUMENT_CHARACTERS)
    ]
    return first_texts(
        [piece for start in range(7) for piece in pieces[start::7]], 2 * TEXT_BYTES
    )


def first_texts(texts: Sequence[str], most_bytes: int) -> list[str]:
    """Return the first texts until they have `most_bytes` together."""
    chosen, size = [], 0
    for text in texts:
        chosen.append(text)
        size += len(text.encode())
        if size >= most_bytes:
            break
    return chosen
