"""The processes of a small training, forked from one that has loaded everything: a fraction of torchrun's time.

Each process that torchrun starts spends seconds on loading what they all need. That is nothing beside a
real training, and more than all the rest beside one of three steps.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.checkout import ROOT
from gristmill.core.files import read_json
from gristmill.core.processes import end_with_parent

LOADED_LATE = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
)
"""What a training loads when it needs it."""


def measured_by(module: str, ranks: int) -> Any:
    """What `python -m MODULE FILE RANKS` writes into the file, as JSON, of so many processes; see `run_forking`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        run_forking(module, str(file), str(ranks), called=f"{ranks} processes")
        return read_json(file)


def run_forking(module: str, *arguments: str, called: str) -> None:
    """Run a module that forks ranks, in a process of its own, where this one may have threads.

    Args:
        module, arguments: of `python -m`.
        called: what it is in the message of an error.

    Raises:
        RuntimeError: a process failed; what it printed is in the message.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{called}: {done.stderr[-4000:]}")


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
    os.environ.update(
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
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
