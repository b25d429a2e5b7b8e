"""`gristmill bench chaos_disk`: every stage on a disk that is full from its n-th change
on.

The points go through all stages in turn and, in each, evenly through its changes; the
remaining space is drawn by hash. `surroundings.fill_the_disk` defines the accepted
outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.chaos.chaos import (
    Fault,
    disturb,
    play,
    rows_of,
    undisturbed_runs,
)
from benchmarks.chaos.kills import Result, draw
from benchmarks.chaos.surroundings import Scene, fill_the_disk
from benchmarks.measuring import Row

NAME = "the disk is full at any write"
PROMISED = (
    "code 1, the reason and no commit, or the right bytes; with space the "
    "same command ends with the right bytes"
)


def rows(
    points: int = 200, seed: int = 0, folder: Path | None = None, at_once: int = 2
) -> Iterator[Row]:
    """Fill the disk under each stage; arguments as of `chaos.rows`."""
    results = disturb(
        partial(all_points, points, seed), f"disk-{seed}", folder, at_once
    )
    yield from rows_of(NAME, PROMISED, {NAME: PROMISED}, results)


def all_points(points: int, seed: int, work: Path) -> dict[str, Callable[[], Result]]:
    """Return all points by name."""
    runs = undisturbed_runs(work)
    turns = -(-points // len(runs))
    scenes: dict[str, Callable[[], Result]] = {}
    for number in range(points):
        turn, place = divmod(number, len(runs))
        stage = list(runs)[place]
        scene = Scene(runs[stage], work / f"disk-{number}", stage, seed, number)
        share = (turn + draw(seed, number, "share")) / turns
        fault = Fault(NAME, PROMISED, partial(fill_the_disk, share=share))
        scenes[f"{NAME}, {number}: {stage}"] = partial(play, fault, scene)
    return scenes
