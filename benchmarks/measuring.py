"""Rows of a benchmark, their floors, processes, and the timing of two sides in turns, so that both meet the same load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""`name`, `ours`, `peer`, `unit` and `ratio`, where None was not measured; `note` and `floor` where there is one."""


def row(
    name: str, ours: float | None, peer: float | None, unit: str, note: str = "", floor: float | None = None
) -> Row:
    """A row whose ratio is ours over the peer's, which for rates is over 1 where ours is faster.

    `floor` is the least ratio that `gristmill bench floors` accepts; its source stands in a comment beside it.
    """
    ratio = None if ours is None or not peer else ours / peer
    measured: Row = {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio}
    notes = {"note": note} if note else {}
    floors = {} if floor is None else {"floor": floor}
    return {**measured, **notes, **floors}


def fell(measured: Row) -> bool:
    """Whether a row's ratio is below its floor; a row without a floor, or whose peer is not installed, did not fall."""
    floor, ratio = measured.get("floor"), measured["ratio"]
    return floor is not None and ratio is not None and ratio < floor


def fastest(repeats: int, *works: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The least seconds of each side over some repeats, which the sides take by turns.

    `clock` is `time.process_time` where all work is done in this process: other load then counts for nearly nothing.
    """
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, seconds in zip(works, taken, strict=True):
            begun = clock()
            work()
            seconds.append(clock() - begun)
    return [min(seconds) for seconds in taken]


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    tree = [pid]
    for parent in tree:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                tree.extend(map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
    return tree
