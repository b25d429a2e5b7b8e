"""A process group of this process only: what benchmarks and measurements train in."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from gristmill.train.parallel.world import World, process_group


@contextmanager
def single_process() -> Iterator[World]:
    """Join a group of one, as torchrun would start it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    with process_group() as world:
        yield world
