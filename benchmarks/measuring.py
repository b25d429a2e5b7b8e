"""What every benchmark yields, a row, and how two sides are timed so that both meet the same other load."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
"""`name`, `ours`, `peer`, `unit` and `ratio`, where None was not measured; `note` where there is one."""


def row(name: str, ours: float | None, peer: float | None, unit: str, note: str = "") -> Row:
    """A row whose ratio is ours over the peer's, which for rates is over 1 where ours is faster."""
    ratio = None if ours is None or not peer else ours / peer
    found: Row = {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio}
    return {**found, "note": note} if note else found


def fastest(repeats: int, *works: Callable[[], object]) -> list[float]:
    """The least seconds of each side over some repeats, which the sides take by turns."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, seconds in zip(works, taken, strict=True):
            begun = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begun)
    return [min(seconds) for seconds in taken]
