"""`gristmill bench tokenize`: best-fit packing, against the usual Python of it, and what it saves beside `stream`."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gristmill.tokenize.mixing.best_fit import best_fit_decreasing
from gristmill.tokenize.mixing.mix_summary import compare
from gristmill.tokenize.mixing.packing import Packing, TokenStream, lay_out

DOCUMENTS, LENGTH = 200_000, 2048
MEDIAN_TOKENS, SPREAD = 600, 1.2
"""Of a log-normal distribution: near what web pages have after extraction (FineWeb's mean is about 1,000 tokens)."""
REPEATS = 3


def rows() -> Iterator[dict[str, Any]]:
    """Rows of name, ours, peer, unit, ratio (ours / peer)."""
    drawn = np.random.default_rng(5).lognormal(np.log(MEDIAN_TOKENS), SPREAD, DOCUMENTS)
    sizes = drawn.astype(np.int64) + 1
    rests = (sizes % LENGTH)[sizes % LENGTH > 0].astype(np.int32)
    best_fit_decreasing(rests[:10], LENGTH)
    ours = python = float("inf")
    for _ in range(REPEATS):  # by turns
        ours = min(ours, _seconds(lambda: best_fit_decreasing(rests, LENGTH)))
        python = min(python, _seconds(lambda: bisected(rests.tolist(), LENGTH)))
    million = len(rests) / 1e6
    yield _row("pack_best_fit", million / ours, million / python, "M documents/s", "peer: a sorted list and bisect")
    starts = np.concatenate([[0], np.cumsum(sizes)])
    stream = TokenStream(starts, np.arange(DOCUMENTS), np.zeros(DOCUMENTS, dtype=np.int32))
    used = Packing(LENGTH)
    costs = compare(stream, stream.tokens, used, lay_out(stream, 0, stream.tokens, used))
    for name, found in costs.items():
        note = (f"padding {found['padding_tokens'] / found['rows'] / LENGTH:.3%}, dropped "
                f"{found['dropped_tokens'] / stream.tokens:.2%}; peer: stream")
        yield _row(f"documents cut: {name}", found["split_documents"] / DOCUMENTS,
                   costs["stream"]["split_documents"] / DOCUMENTS, "share", note)


def bisected(lengths: list[int], capacity: int) -> int:
    """Best-fit-decreasing with the spaces of all bins in a sorted list; the number of bins."""
    spaces: list[int] = []
    used = 0
    for length in sorted(lengths, reverse=True):
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces.pop(place)
        else:
            used, space = used + 1, capacity
        if space > length:
            insort(spaces, space - length)
    return used


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _row(name: str, ours: float, peer: float, unit: str, note: str) -> dict[str, Any]:
    return {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ours / peer, "note": note}
