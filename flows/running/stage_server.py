"""Fork server of a run's stages: imports once the modules that all stages need.

A stage of a small corpus works for a fraction of a second after two seconds of imports:
Arrow, numba, its own modules. Stages that prepare documents or tokens start as forks of
one process with these imports, and share the connection to a cluster
(`runners/shared_driver.py`); trainings start as separate programs. A fork looks like a
program from outside: it has its own number, session, output and environment, gets the
same signals, and ends with its run.

A command that runs stages starts the server (`early_server`) before it reads the
manifest, which takes as long as the imports, so both proceed in parallel. Modules of
manifests are therefore imported where they are used.

`python -m gristmill.flows.running.stage_server SOCKET` is the server's side;
`stage_server` is the client's.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.core.arrays import avoid_pandas
from gristmill.core.files import DEFAULT_STORE, read_json
from gristmill.core.processes import (
    STAGE_ENVIRONMENT,
    end_with_parent,
    without_collection,
)
from gristmill.flows.running.fork_server import ForkRequest, ForkServer, Server

if TYPE_CHECKING:
    from gristmill.dataprep.runners.shared_driver import SharedDriver, SharedProcess
    from gristmill.flows.stages.plan import Plan
    from gristmill.mixtures.schema.engine import Engine

FORKABLE = ("gristmill.dataprep.", "gristmill.tokenize.")
"""Packages of such stages. Importing these starts no thread, which a fork would
lose.
"""
FIRST = (
    "gristmill.flows.running.execute",
    "gristmill.dataprep.documents",
    "gristmill.dataprep.readers.ingest",
    "pyarrow.acero",
    "psutil",
)
"""Modules that all such stages need."""
LATER = (
    "gristmill.dataprep.count_losses",
    "numba",
    "scipy.linalg.cython_blas",
    "awkward",
    "gristmill.dataprep.text.preload",
)
"""Modules that most of them need. Those after the first are parts of the last one's
imports, between which a stage can start.
"""
BEAM = "gristmill.dataprep.runners.beam_preload"
"""Module that stages of a large corpus need: a second of imports."""
PLAIN_SUFFIXES = (".csv", ".html", ".json", ".jsonl", ".md", ".py", ".tsv", ".txt")
COMPRESSION = 4
"""Estimated bytes of text per byte of a file with another suffix."""
LARGE_BYTES = 500_000_000
"""Text from which on stages have jobs for pipelines (`dataprep.runners.tasks`)."""
FEWEST = 2
"""Minimum number of stages that justify the process."""


class StageServer(ForkServer):
    """Client of the server.

    Attributes:
        driver: driver of the run's cluster, which its stages share.
        forks_trainings: also start trainings of one process as forks, for many small
            ones: torch is imported once, and torchrun is not started.
    """

    driver: SharedDriver | None = None
    forks_trainings: bool = False

    @contextmanager
    def driver_environment(self) -> Iterator[Mapping[str, str]]:
        """Context of a stage's process, with the variables by which it finds the
        driver.
        """
        if self.driver is None:
            yield {}
            return
        with self.driver.used() as environment:
            yield environment


_early: list[StageServer] = []
"""Server that was started early, until it is used."""


@contextmanager
def early_server(
    manifest: str, overrides: Sequence[str], store: str | None
) -> Iterator[None]:
    """Start the server of a run's stages before the stages are known; ends it if it
    stays unused.

    Skipped if the last run in a local store completed the same command, which suggests
    that all stages are made; this guess may be wrong.

    Args:
        manifest, overrides, store: arguments of the command.
    """
    runs = Path(store or os.environ.get("GRISTMILL_STORE") or DEFAULT_STORE) / "runs"
    last_record = max(runs.glob("*/run.json"), default=None)
    is_made = False
    file = Path(manifest)
    with suppress(OSError, ValueError):  # an unreadable file suggests nothing
        if (
            last_record is not None
            and last_record.stat().st_mtime >= file.stat().st_mtime
        ):
            record = read_json(last_record)
            is_made = (
                record["state"] == "completed"
                and record["manifest_file"] == str(file.resolve())
                and record["overrides"] == list(overrides)
            )
    if not is_made:
        _early.append(_start())
    try:
        yield
    finally:
        _end_early()


@contextmanager
def proxy_server(plan: Plan, engine: Engine) -> Iterator[StageServer | None]:
    """Server for many small trainings and the stages before them; see
    `stage_server`. Trainings on GPUs are not forked.
    """
    from gristmill.mixtures.schema.engine import visible_gpus

    is_alone = engine.nodes == engine.num_ranks == 1 and not visible_gpus()
    with stage_server(plan, plan, engine) as server:
        if server is not None:
            server.forks_trainings = is_alone
        yield server


@contextmanager
def stage_server(
    plan: Plan, stages: Iterable[str], engine: Engine
) -> Iterator[StageServer | None]:
    """Server for a run's stages within the block; None if it is not worth it.

    Args:
        plan: the run's plan.
        stages: stages to make.
        engine: of its manifest.
    """
    from gristmill.mixtures.schema.engine import CONNECTED

    nodes = [plan[name] for name in stages if is_forkable(plan, name)]
    modules_per_stage = [
        (node.stage.module, *node.stage.preload(node.settings)) for node in nodes
    ]
    if len(nodes) < FEWEST:
        _end_early()
        yield None
        return
    server = _early.pop() if _early else _start()
    start = driver_of(engine)
    if start is not None:
        from gristmill.dataprep.runners.shared_driver import SharedDriver

        server.driver = SharedDriver(start)
        server.driver.start_soon()
    try:
        # Modules shared by all stages after the first precede those of single stages.
        uses_beam = engine.runner not in CONNECTED and (
            engine.runner != "local" or text_bytes(plan) >= LARGE_BYTES
        )
        later = [*LATER, BEAM] if uses_beam else LATER
        server.import_soon(
            list(
                dict.fromkeys(
                    chain(
                        modules_per_stage[0],
                        later,
                        *modules_per_stage[1:],
                    )
                )
            )
        )
        yield server
    finally:
        server.close()
        if server.driver is not None:
            server.driver.close()


def driver_of(engine: Engine) -> Callable[[], SharedProcess] | None:
    """Function that starts the process that stages share on an engine; None if they
    share none.
    """
    from gristmill.mixtures.schema.engine import CONNECTED

    if engine.runner in CONNECTED:
        from gristmill.dataprep.runners.shared_driver import Driver

        return partial(Driver, engine)
    if engine.runner == "flink" and "job_endpoint" not in engine.options:
        from gristmill.dataprep.runners.portable import start_run_server

        return partial(start_run_server, engine)
    return None


def text_bytes(plan: Plan) -> int:
    """Estimated text of the sources, from their listings."""
    from gristmill.mixtures.schema.sources import INGEST

    sources = plan[INGEST].config["sources"].values() if INGEST in plan else ()
    return sum(
        file["size"] * (1 if file["path"].endswith(PLAIN_SUFFIXES) else COMPRESSION)
        for source in sources
        for file in source["listing"]
    )


def _start() -> StageServer:
    return StageServer(__name__, {**STAGE_ENVIRONMENT, "PYTHONHASHSEED": "0"})


def _end_early() -> None:
    while _early:
        _early.pop().close()


def is_forkable(plan: Plan, stage: str, with_trainings: bool = False) -> bool:
    """True if a stage may start as a fork."""
    kind = plan[stage].stage
    if kind.torchrun:
        return with_trainings
    return kind.run.startswith(FORKABLE)


def main(argv: list[str]) -> None:
    """Import modules, and fork stages on request until the socket is closed."""
    (descriptor,) = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    with without_collection(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        avoid_pandas()
        for name in FIRST:
            importlib.import_module(name)
        gc.freeze()
    with socket.socket(fileno=int(descriptor)) as requests:
        # The later modules are imported while the first stages work.
        Server(requests, become_stage, LATER).serve()


def become_stage(request: ForkRequest) -> int:
    """Continue as the process of the request's stage, and return its exit code."""
    from gristmill.flows.running.execute import main as execute

    os.setsid()
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update({**request["environment"], "GRISTMILL_PARENT": str(os.getppid())})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, number in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "w", closefd=False)
        setattr(
            sys,
            stream,
            io.TextIOWrapper(
                raw, errors="backslashreplace", line_buffering=True, write_through=True
            ),
        )
    try:
        return execute(list(request["command"]))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # the interpreter would clear all modules first
