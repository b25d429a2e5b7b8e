"""Which Beam runner a job gets, made ready: Beam's own local one with what it lacks, a Dask cluster, or any other.

The local one is named explicitly because Beam's default runner tries to download a binary first. Its gRPC servers
are bound to the loopback address: as shipped they listen on all interfaces, without authentication.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from gristmill.dataprep.jobs.dask_cluster import check_cluster, dask_options
from gristmill.dataprep.jobs.job_errors import WorkerError

Mode = Literal["memory", "threads", "processes"]
TRACEBACK_LOGGERS = (
    "apache_beam.runners.common", "apache_beam.runners.worker.sdk_worker", "apache_beam.runners.worker.sdk_worker_main",
    "apache_beam.runners.worker.data_plane",
)  # fmt: skip
SELDOM_NEEDED = ("boto3", "bson", "pandas", "pymongo", "requests")
"""Packages that Beam imports where they are installed, for its sources, its sinks and its data frames."""
COMPLAINING_LOGGERS = ("root", "apache_beam.io.mongodbio")
"""Which say so where one of them is missing."""
EMBEDDED = "embed"
"""Beam's word for a job server inside of this process."""
ANSWER_SECONDS = 30.0
"""For a job server to answer, unless `job_server_timeout` says otherwise."""
BEAM_NAMES = {"dask": "apache_beam.runners.dask.dask_runner.DaskRunner"}
_loopback_lock = threading.Lock()


def import_beam(whole: bool = False) -> Any:
    """Import Beam without its warnings about optional libraries, which concern nobody here.

    Args:
        whole: also with what its own sources and sinks need, which no job here uses: it takes as long as all the rest.
    """
    seldom_needed = nullcontext() if whole or "apache_beam" in sys.modules else _Without(SELDOM_NEEDED)
    loggers = [logging.getLogger(name) for name in COMPLAINING_LOGGERS]
    for logger in loggers:
        logger.addFilter(_is_about_beam)
    try:
        with seldom_needed, without_collection():
            import apache_beam
    finally:
        for logger in loggers:
            logger.removeFilter(_is_about_beam)
    return apache_beam


@contextmanager
def without_collection() -> Iterator[None]:
    """Within it nobody looks for garbage, of which imports leave none: the search takes a seventh of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_about_beam(record: logging.LogRecord) -> bool:
    return not any(package in record.getMessage() for package in ("apitools", "bson"))


class _Without:
    """Within it, importing some packages fails in this thread as if they were not installed, unless they are there."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._thread = names, threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """What Python asks before any other finder."""
        if name in self._names and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{name} is not imported with Beam", name=name)

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]


def quieten_beam() -> None:
    """Leave Beam its warnings, but not the tracebacks that its workers log: errors reach their reader otherwise."""
    logging.getLogger("apache_beam").setLevel(logging.WARNING)
    for name in TRACEBACK_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def bind_grpc_to_loopback() -> None:
    """Make every gRPC server of this process listen on 127.0.0.1 where it asked for all interfaces."""
    import grpc

    with _loopback_lock:
        if getattr(grpc.server, "_gristmill_loopback", False):
            return
        original = grpc.server

        def server(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            add_insecure_port = made.add_insecure_port
            made.add_insecure_port = lambda address: add_insecure_port(
                address.replace("[::]:", "127.0.0.1:").replace("0.0.0.0:", "127.0.0.1:")
            )
            return made

        server._gristmill_loopback = True  # type: ignore[attr-defined]
        grpc.server = server


def make_pipeline(
    runner: str, workers: int, options: Mapping[str, Any], mode: Mode = "threads", address: str | None = None,
    num_tasks: int = 1, module: str = "",
) -> Any:  # fmt: skip
    """Make an empty Beam pipeline.

    Args:
        runner: `local`, `dask`, or any name that Beam knows.
        workers: parallel workers of the local runner.
        options: pipeline options for another runner, by Beam's names.
        mode: what the workers of the local runner are.
        address: of the Dask scheduler.
        num_tasks: elements of the pipeline.
        module: of this package, which the local runner's worker processes need, or empty.

    Raises:
        WorkerError: the cluster, or the job server, does not answer.
    """
    beam = import_beam(whole=runner != "local")
    from apache_beam.options.pipeline_options import PipelineOptions

    quieten_beam()
    bind_grpc_to_loopback()
    if runner == "local":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        local_runner, default_options = _local_runner(mode, workers, module)
        return beam.Pipeline(runner=local_runner, options=default_options)
    if runner == "dask":
        options = dask_options(address, num_tasks, options)
        check_cluster(options)
    if options.get("job_endpoint", EMBEDDED) != EMBEDDED:
        check_job_server(options["job_endpoint"], float(options.get("job_server_timeout", ANSWER_SECONDS)))
    # As flags: the options of a runner are known only once Beam has imported it.
    return beam.Pipeline(options=PipelineOptions.from_dictionary({"runner": BEAM_NAMES.get(runner, runner), **options}))


def check_job_server(endpoint: str, seconds: float) -> None:
    """Raise WorkerError unless a job server answers; Beam waits for five minutes, and then says nothing of it."""
    import grpc

    with grpc.insecure_channel(endpoint) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
        except grpc.FutureTimeoutError as error:
            raise WorkerError(f"no job server answers at {endpoint} within {seconds:g} s; start it, or correct "
                              "engine.options.job_endpoint (job_server_timeout waits longer)") from error


def _local_runner(mode: Mode, workers: int, module: str) -> tuple[Any, Any]:
    """The local runner and its options, both of which know Beam from the inside."""
    try:
        from gristmill.dataprep.jobs.default_options import DefaultOptions
        from gristmill.dataprep.jobs.local_runner import LocalRunner
    except (ImportError, AttributeError) as error:
        import apache_beam

        raise ImportError(
            f"Apache Beam {apache_beam.__version__} has another inside than the versions that the local runner is "
            f"written for ({error}); install one that pyproject.toml allows: pip install 'apache-beam>=2.77,<2.78'"
        ) from error
    return LocalRunner(mode, workers, module), DefaultOptions()
