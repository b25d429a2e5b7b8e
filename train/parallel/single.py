"""A process group of this process only: what benchmarks and measurements train in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from gristmill.train.parallel.world import World, process_group


@contextmanager
def single_process() -> Iterator[World]:
    """Join a group of one, as torchrun would start it, but for a store that nobody else can reach."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with process_group(store=dist.HashStore()) as world:  # type: ignore[attr-defined]
        yield world
