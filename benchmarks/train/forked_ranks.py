"""Ranks of a small training, forked from a process that has imported everything: a
fraction of torchrun's time.

Each process that torchrun starts spends seconds on imports. That is nothing beside a
real training, and most of the time of one of three steps.
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
from gristmill.core.files import read_json, write_json
from gristmill.core.processes import end_with_parent
from gristmill.train.distributed.process_groups import World, process_group

LOADED_LATE = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
)
"""Modules that a training imports only when it needs them."""


def measured_by(module: str, ranks: int) -> Any:
    """Return the JSON that `python -m MODULE FILE RANKS` writes into the file; see
    `run_forking`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measurements.json"
        run_forking(module, str(file), str(ranks), title=f"{ranks} processes")
        return read_json(file)


def run_forking(module: str, *arguments: str, title: str) -> None:
    """Run a module that forks ranks in a process of its own, since this one may have
    threads.

    Args:
        module: of `python -m`.
        arguments: of its command line.
        title: beginning of the message of an error.

    Raises:
        RuntimeError: a process failed; the message has its output.
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
        raise RuntimeError(f"{title}: {done.stderr[-4000:]}")


def load_all() -> None:
    """Import modules that ranks will need, in a process that is about to fork them and
    computes nothing itself.

    It has one thread only: others would be lost by a fork, and their locks stay held.
    """
    torch.set_num_threads(1)
    for name in LOADED_LATE:
        importlib.import_module(name)


def write_measurements(measure: Callable[[World], Any], file: Path) -> None:
    """Call a function in a rank, and write what it returns in the first rank into a
    JSON file.
    """
    with process_group() as world:
        measurements = measure(world)
        if world.is_first:
            write_json(file, measurements)


def fork_ranks(ranks: int, work: Callable[[], object]) -> None:
    """Call a function in new processes that find each other as those of torchrun do,
    and wait for them.

    Once one has failed the others are killed, as they may be waiting for it; its
    exception is on standard error.

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
        child = os.fork()
        if child == 0:
            end_with_parent(signal.SIGKILL, parent)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            _call_and_exit(work)
        running.add(child)
    while running:
        child, status = os.wait()
        running.discard(child)
        if status:
            for sibling in running:
                os.kill(sibling, signal.SIGKILL)
                os.waitpid(sibling, 0)
            sys.exit(f"one of {ranks} processes failed")


def _call_and_exit(work: Callable[[], object]) -> NoReturn:
    """Call a function, and end without the parent's exit handlers."""
    status = 1
    try:
        work()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
