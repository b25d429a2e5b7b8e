"""`gristmill bench chaos_disk`: every stage on a disk that is full from its n-th change on.

The places go through all stages in turn and, in each, evenly through its changes; how much space is left then is drawn
by hash. `surroundings.fill_the_disk` says what is accepted.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.chaos import Fault, do_points, play, rows_of, undisturbed_runs
from benchmarks.chaos.kills import draw
from benchmarks.chaos.surroundings import Scene, fill_the_disk

NAME = "the disk is full at any write"
PROMISED = "code 1, the reason and no commit, or the right bytes; with space the same command ends with the right bytes"


def rows(points: int = 200, seed: int = 0, folder: Path | None = None, at_once: int = 2) -> Iterator[dict[str, Any]]:
    """Fill the disk under each stage, and yield a row for all of them; arguments as of `chaos.rows`."""
    work = Path(tempfile.mkdtemp(prefix="gristmill-chaos-")) if folder is None else folder
    runs = undisturbed_runs(work)
    turns = -(-points // len(runs))
    scenes = {}
    for number in range(points):
        turn, place = divmod(number, len(runs))
        stage = list(runs)[place]
        scene = Scene(runs[stage], work / f"disk-{number}", stage, seed, number)
        share = (turn + draw(seed, number, "share")) / turns
        fault = Fault(NAME, PROMISED, partial(fill_the_disk, share=share))
        scenes[f"{NAME}, {number}: {stage}"] = partial(play, fault, scene)
    results = do_points(scenes, work / f"disk-{seed}.jsonl", at_once)
    if folder is None and not any(result["wrong"] for result in results):
        shutil.rmtree(work)
    yield from rows_of(NAME, PROMISED, [(NAME, PROMISED)], results)
