"""How kernels are timed beside a named peer, on the same text and on one thread, and texts to time them on.

Code is of this Python's standard library, a few kilobytes each; prose is of `benchmarks.installed_texts`.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.measuring import Row, fastest, row

DOCUMENT_CHARACTERS = 4000
DOCUMENTS = 2000
PEER_DOCUMENTS = 200
"""The peers are slow: they get the first documents only; rates are per byte."""
REPEATS = 3


def compare(name: str, texts: list[str], ours: Callable[[pa.Array], Any], peer: Callable[[list[str]], Any]) -> Row:
    """Time both, each on texts as it takes them."""
    array = pa.array(texts, pa.large_string())
    ours(array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    our_rate = rate(lambda: ours(array), texts)
    peer_rate = rate(lambda: peer(texts[:PEER_DOCUMENTS]), texts[:PEER_DOCUMENTS])
    return row(name, our_rate, peer_rate, "MB/s")


def rate(work: Callable[[], Any], texts: list[str]) -> float:
    """MB per second of processor time of the fastest of some repeats."""
    (seconds,) = fastest(REPEATS, work, clock=time.process_time)
    return sum(len(text.encode()) for text in texts) / 1e6 / seconds


def library_texts(documents: int) -> list[str]:
    """Pieces of the modules of this Python's standard library, in the order of their names."""
    pieces: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        pieces += [text[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(text), DOCUMENT_CHARACTERS)]
        if len(pieces) >= documents:
            break
    return pieces[:documents]
