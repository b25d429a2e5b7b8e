"""The processes of a small training, forked from one that has loaded everything: a fraction of torchrun's time.

Each process that torchrun starts spends seconds on loading what they all need. That is nothing beside a
real training, and more than all the rest beside one of three steps.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from gristmill.dataprep.processes import end_with_parent

LOADED_LATE = ("torch._dynamo", "torch.distributed.checkpoint.state_dict_saver", "torch.distributed.fsdp",
               "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "torch.utils.tensorboard")
"""What a training loads when it needs it."""


def load_all() -> None:
    """Load what the processes will need, in a process that is about to fork them and computes nothing itself.

    A thread would be lost by a fork, and its locks stay held: so there is only this one.
    """
    torch.set_num_threads(1)
    for name in LOADED_LATE:
        importlib.import_module(name)


def fork_ranks(ranks: int, work: Callable[[], object]) -> None:
    """Call a function in so many new processes that find each other as those of torchrun do, and wait for them.

    Once one has failed the others are killed, as they may be waiting for it; what it raised is on the standard error.

    Raises:
        SystemExit: a process failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    parent, running = os.getpid(), set()
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            end_with_parent(signal.SIGKILL, parent)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            _call_and_exit(work)
        running.add(child)
    while running:
        child, status = os.wait()
        running.discard(child)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            sys.exit(f"one of {ranks} processes failed")


def _call_and_exit(work: Callable[[], object]) -> NoReturn:
    """End without what the forking process would do at its own end."""
    status = 1
    try:
        work()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
