"""What a training measures before its first step: kept for when it goes on, since by then the model is another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gristmill.dataprep.files import read_json, write_json
from gristmill.train.parallel.world import World, agree

Found = TypeVar("Found")


def measured_once(file: Path, world: World, measure: Callable[[], Found]) -> Found:
    """The content of a file, the same on every rank; `measure`, called on every rank, makes it where there is none.

    Args:
        file: of the training's working folder; JSON.
        world: the processes.
        measure: what it finds must survive JSON; what it raises leaves no file.
    """
    if not agree(file.exists(), world):
        found = measure()
        if world.is_first:
            write_json(file, found)
    told: Found = agree(read_json(file) if world.is_first else None, world)
    return told
