"""The process from which a run's stages are forked: it imports once what otherwise each stage would import again.

A stage of a small corpus works for a fraction of a second, and imports for two: Beam, Arrow, numba, its own modules.
Stages that prepare documents or tokens on this machine begin as forks of one process that has all this; all others
(trainings, those on a cluster) begin as programs of their own. A fork is like such a program to whoever looks at it:
it has its own number, session, output and environment, gets the same signals, and ends with its run.

`python -m gristmill.flows.running.stage_server SOCKET MODULE...` is the inside; `stage_server` is for those outside.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gristmill.flows.running.fork_server import ForkServer, Server
from gristmill.flows.running.process import DEFAULT_ENVIRONMENT
from gristmill.flows.stages.plan import Plan
from gristmill.mixtures.manifest import Engine

FORKABLE = ("gristmill.dataprep.", "gristmill.tokenize.")
"""Where the work of such stages is defined. Importing these starts no thread, which a fork would lose."""
LATER = ("fasttext", "tokenizers", "gigatoken", "awkward")
"""What stages import where they use it."""
FEWEST = 2
"""Stages to be made that are worth the process."""


@contextmanager
def stage_server(plan: Plan, stages: Iterable[str], engine: Engine) -> Iterator[ForkServer | None]:
    """The process that stages of a run are forked from, until what is inside is left; None where it is not worth one.

    Args:
        plan: of the run.
        stages: those that are to be made.
        engine: of its manifest.
    """
    modules = [plan[name].stage.run.partition(":")[0] for name in stages if is_forkable(plan, name)]
    if len(modules) < FEWEST or engine.runner != "local":
        yield None
        return
    server = ForkServer(__name__, {**DEFAULT_ENVIRONMENT, "PYTHONHASHSEED": "0"}, list(dict.fromkeys(modules)))
    try:
        yield server
    finally:
        server.close()


def is_forkable(plan: Plan, stage: str) -> bool:
    """Whether a stage may begin as a fork."""
    kind = plan[stage].stage
    return kind.launch == "process" and kind.run.startswith(FORKABLE)


def main(argv: list[str]) -> None:
    """Import, and fork stages as they are asked for, until the socket of this descriptor is closed."""
    descriptor, *modules = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from gristmill.dataprep.jobs.runner import import_beam, without_collection

    with without_collection(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("gristmill.flows.running.execute")
        importlib.import_module(modules[0])
        import_beam()
        importlib.import_module("apache_beam.runners.portability.fn_api_runner")
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as requests:
        # The rest while the first stages work.
        Server(requests, become_stage, [*modules[1:], *LATER]).serve()


def become_stage(request: Mapping[str, Any]) -> int:
    """Continue as the process of the stage in this folder; returns its exit code."""
    from gristmill.flows.running.execute import main as execute

    os.setsid()
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update({**request["environment"], "GRISTMILL_PARENT": str(os.getppid())})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, number in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "w", closefd=False)
        setattr(sys, stream, io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True, write_through=True))
    try:
        return execute(list(request["command"]))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


if __name__ == "__main__":
    main(sys.argv[1:])
