"""Texts to time kernels on, and their timing beside a named peer on the same text and
one thread.

Code is of this Python's standard library, a few kilobytes each; prose is of
`benchmarks.installed_texts`.
"""

from __future__ import annotations

import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.measuring import Row, fastest, row, text_megabytes

DOCUMENT_CHARACTERS = 4000
DOCUMENTS = 2000
PEER_DOCUMENTS = 200
"""The peers are slow: they get the first documents only; rates are per byte."""
REPEATS = 3


def compare(
    name: str,
    texts: list[str],
    ours: Callable[[pa.Array], Any],
    peer: Callable[[list[str]], Any],
) -> Row:
    """Time both sides, each on texts in its own form."""
    array = pa.array(texts, pa.large_string())
    ours(array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    peer_texts = texts[:PEER_DOCUMENTS]
    return row(
        name,
        rate(lambda: ours(array), texts),
        rate(lambda: peer(peer_texts), peer_texts),
        "MB/s",
    )


def rate(work: Callable[[], Any], texts: list[str]) -> float:
    """Return MB per second of processor time, of the fastest of some repeats."""
    (seconds,) = fastest(REPEATS, work, clock=time.process_time)
    return text_megabytes(texts) / seconds


def library_texts(documents: int) -> list[str]:
    """Cut the modules of this Python's standard library into pieces, in the order of
    their names.
    """
    pieces: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        pieces += [
            text[start : start + DOCUMENT_CHARACTERS]
            for start in range(0, len(text), DOCUMENT_CHARACTERS)
        ]
        if len(pieces) >= documents:
            break
    return pieces[:documents]


def word_ngrams(text: str, size: int) -> Iterator[tuple[str, ...]]:
    """Return the n-grams of a text's words in lower case, as peers in plain Python cut
    them.
    """
    words = re.findall(r"\w+", text.lower())
    return (
        tuple(words[start : start + size]) for start in range(len(words) - size + 1)
    )
