"""Runners of jobs, by the manifest's `engine.runner`; for Beam's, a pipeline of one
linear chain that runs the tasks and may shuffle.

The local runner is Beam's own, in this process and a single thread: its step hands the
tasks to the workers of this machine (`pool.py`). It is named explicitly, because Beam's
default runner tries to download a binary first. Any other runner gets one element per
task, or per several of many tasks, distributes them over its cluster, and groups the
tasks' outputs by their numbers (`shuffle.py`).

Ray, Dask and Spark run the same functions through their own interfaces
(`connections.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from gristmill.core.processes import wait_until, without_collection
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners.connection import GroupWork, Receive
from gristmill.dataprep.runners.connections import run_by_connection
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.dataprep.runners.pool import Element, Mode, Pool, Work
from gristmill.dataprep.runners.servers import answers
from gristmill.dataprep.runners.ship_files import carry_step
from gristmill.mixtures.schema.engine import CONNECTED, EngineOptions

TRACEBACK_LOGGERS = (
    "apache_beam.runners.common",
    "apache_beam.runners.worker.sdk_worker",
    "apache_beam.runners.worker.sdk_worker_main",
    "apache_beam.runners.worker.data_plane",
)
LOCAL_OPTIONS = {"runner": "FnApiRunner", "direct_running_mode": "in_memory"}
EMBEDDED = "embed"
"""Beam's `job_endpoint` for a job server inside of this process."""
LOOPBACK = "LOOPBACK"
"""Beam's `environment_type` for workers inside of this process."""
ANSWER_SECONDS = 30.0
"""Default timeout for the answer of a job server (`job_server_timeout`)."""
BEAM_NAMES = {
    "flink": "PortableRunner",
    "dataflow": "DataflowRunner",
}
ENDED = ("DONE", "FAILED", "CANCELLED", "UPDATED", "DRAINED")
"""Terminal states of a Beam job."""
POLL_SECONDS = 0.05
"""Interval between checks of a job with a time limit."""


def run_here(job: str, pool: Pool, work: Work, elements: Sequence[Element]) -> None:
    """Run a job with the local runner.

    Args:
        job: name of the job.
        pool: workers that share the elements.
        work: runs one element.
        elements: all elements.
    """
    beam = import_beam()
    pipeline = make_pipeline(LOCAL_OPTIONS)
    # beam.Create would add three steps.
    _ = (
        pipeline
        | beam.Impulse()
        | f"{job}: process" >> beam.FlatMap(partial(_do_all, pool, work, elements))
    )
    run_pipeline(pipeline)


def run_there(
    job: str,
    context: Context,
    work: GroupWork,
    groups: Sequence[Sequence[Element]],
    receive: Receive | None = None,
    seconds: float | None = None,
    mode: Mode = "threads",
) -> None:
    """Run a job with another runner, which may retry each element.

    Args:
        job: name of the job.
        context: the runner and its options.
        work: runs the tasks of one element. Each pair of a number and bytes that it
            yields goes to `receive` after all elements are done.
        groups: all elements.
        receive: receives a number and all bytes yielded with it, in any order; may be
            retried too.
        seconds: time limit of the job, or None; of no effect on Spark.
        mode: `processes` if `work` holds the GIL, so that threads would not help.

    Raises:
        WorkerError: the cluster or the job server does not answer.
        TimeoutError: the job exceeded its time limit.
        MissingEngineError: the engine is not on this machine.
    """
    engine = context.beam
    runner = engine.runner
    if runner in CONNECTED:
        run_by_connection(engine, work, groups, receive, seconds, mode)
        return
    beam = import_beam()
    options: EngineOptions = engine.options
    if runner == "local":
        runner = LOCAL_OPTIONS["runner"]
        options = LOCAL_OPTIONS
    endpoint = options.get("job_endpoint")
    seconds_to_answer = float(options.get("job_server_timeout", ANSWER_SECONDS))
    # Beam would wait five minutes without reporting it.
    if endpoint not in (None, EMBEDDED) and not answers(endpoint, seconds_to_answer):
        raise WorkerError(
            f"no job server answers at {endpoint} within {seconds_to_answer:g} s; start "
            "it, or correct engine.options.job_endpoint (job_server_timeout waits "
            "longer)"
        )
    if runner == "flink":
        from gristmill.dataprep.runners.portable import flink_options

        options = flink_options(engine.address, options)
    is_here = endpoint == EMBEDDED or options.get("environment_type") == LOOPBACK
    with listening_on("127.0.0.1") if is_here else nullcontext():
        name = BEAM_NAMES.get(runner, runner)
        pipeline = make_pipeline({**options, "runner": name})
        created = pipeline | f"{job}: shards" >> beam.Create(groups)
        outputs = created | f"{job}: process" >> carry_step(work).with_output_types(
            tuple[int, bytes]
        )
        if receive is not None:
            grouped = outputs | f"{job}: shuffle" >> beam.GroupByKey()
            _ = grouped | f"{job}: receive" >> carry_step(partial(_receive, receive))
        run_pipeline(pipeline, seconds)


def _do_all(
    pool: Pool, work: Work, elements: Sequence[Element], _impulse: bytes
) -> Iterator[None]:
    from apache_beam.runners.worker import statesampler

    # There is only one step, and the sampler's end waits up to 0.2 s for the last
    # sample.
    if (sampler := statesampler.get_current_tracker()) is not None:
        sampler.stop_if_still_running()
    yield from pool(work, elements)


def _receive(receive: Receive, grouped: tuple[int, Iterable[bytes]]) -> Iterator[None]:
    receive(*grouped)
    yield None


def import_beam() -> Any:
    """Import Beam and silence its warnings about optional libraries and its logged
    tracebacks.

    Errors reach the user by other means.
    """
    root = logging.getLogger()
    root.addFilter(_is_no_advice)
    try:
        with without_collection():
            import apache_beam
    finally:
        root.removeFilter(_is_no_advice)
    logging.getLogger("apache_beam").setLevel(logging.WARNING)
    for name in TRACEBACK_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # A job's error has the messages of a job server, or they do not matter if the engine
    # continues.
    root.addFilter(_is_no_message)
    return apache_beam


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "apitools" not in record.getMessage()


def _is_no_message(record: logging.LogRecord) -> bool:
    return record.module != "portable_runner"


def make_pipeline(options: EngineOptions) -> Any:
    """Make an empty Beam pipeline with the runner of the options."""
    from apache_beam import Pipeline
    from apache_beam.options.pipeline_options import PipelineOptions

    # Beam knows a runner's options only after importing it; options from a dictionary
    # are parsed after that.
    pipeline = Pipeline(options=PipelineOptions.from_dictionary(dict(options)))
    # The folder for transforms in other languages would outlive a killed run.
    Path(pipeline.local_tempdir).rmdir()
    return pipeline


def run_pipeline(pipeline: Any, seconds: float | None = None) -> None:
    """Run a linear pipeline to its end.

    Raises:
        TimeoutError: the pipeline did not end within `seconds`.
    """
    result = pipeline.run()
    if seconds is not None:
        wait_no_longer(result, seconds)
    try:
        result.wait_until_finish()
    except (KeyboardInterrupt, SystemExit):
        result.cancel()
        raise


@contextmanager
def listening_on(host: str) -> Iterator[None]:
    """Context in which gRPC servers that bind to all interfaces listen on one address
    instead.

    A job server inside of this process (`job_endpoint: embed`) and workers inside of it
    (`environment_type: LOOPBACK`) run any code sent to them. Beam binds both to all
    interfaces without authentication, and neither Beam nor gRPC has an option for it,
    so `grpc.server` is replaced (docs/patched.md).
    """
    import grpc

    original: Callable[..., Any] = grpc.server

    def server(*args: Any, **kwargs: Any) -> Any:
        grpc_server = original(*args, **kwargs)
        add_insecure_port = grpc_server.add_insecure_port
        grpc_server.add_insecure_port = lambda address: add_insecure_port(
            address.replace("[::]:", f"{host}:").replace("0.0.0.0:", f"{host}:")
        )
        return grpc_server

    grpc.server = server
    try:
        yield
    finally:
        grpc.server = original


def wait_no_longer(result: Any, seconds: float) -> None:
    """Wait for a pipeline with a time limit.

    Raises:
        TimeoutError: the pipeline did not end in time and was cancelled.
    """
    if not wait_until(lambda: result.state in ENDED, seconds, POLL_SECONDS):
        result.cancel()
        raise TimeoutError(f"the job was still {result.state} after {seconds:g} s")
