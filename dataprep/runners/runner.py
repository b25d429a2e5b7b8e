"""Beam pipelines of jobs: the runner of the manifest, and one linear chain that runs
the tasks and may shuffle.

The local runner is Beam's own, in this process and a single thread: its step hands the
tasks to the workers of this machine (`pool.py`). It is named explicitly, because Beam's
default runner tries to download a binary first. Any other runner gets one element per
task, or per several of many tasks, distributes them over its cluster, and groups the
tasks' outputs by their numbers (`shuffle.py`).

This module compensates for gaps of Beam's Dask runner, which returns before the work is
done, never closes its connection, waits silently for workers, and does not count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gristmill.core.processes import without_collection
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.dataprep.runners.pool import Element, Pool, Work
from gristmill.dataprep.runners.servers import answers
from gristmill.dataprep.runners.ship_files import carry_step
from gristmill.mixtures.sections.engine import EngineOptions

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
    "dask": "apache_beam.runners.dask.dask_runner.DaskRunner",
    "flink": "PortableRunner",
    "dataflow": "DataflowRunner",
}
CONNECT_SECONDS = 15
"""Timeout for the answer of a Dask scheduler."""
ENDED = ("DONE", "FAILED", "CANCELLED", "UPDATED", "DRAINED")
"""Terminal states of a Beam job."""
POLL_SECONDS = 0.05
"""Interval between checks of a job with a time limit."""
GroupWork = Callable[[Sequence[Element]], Iterator[Counts | tuple[int, bytes]]]
"""Function that runs the tasks of an element and yields their counts and the data to
shuffle.
"""
Receive = Callable[[int, Iterable[bytes]], None]
"""Function that receives the data shuffled to one number."""
RULE = "a job is one linear chain, because runners may silently lose anything else"


class NotLinearError(ValueError):
    """Error of a pipeline that is not one linear chain."""


def run_here(
    job: str, stage: str, pool: Pool, work: Work, elements: Sequence[Element]
) -> Any:
    """Run a job with the local runner; returns Beam's result, which has the counters.

    Args:
        job: name of the job.
        stage: namespace of its counters.
        pool: workers that share the elements.
        work: runs one element and returns its counts.
        elements: all elements.
    """
    beam = import_beam()
    pipeline = make_pipeline(LOCAL_OPTIONS)
    # beam.Create would add three steps.
    _ = (
        pipeline
        | beam.Impulse()
        | f"{job}: process"
        >> beam.FlatMap(partial(_do_all, stage, pool, work, elements))
    )
    return run_pipeline(pipeline)


def run_there(
    job: str,
    context: Context,
    work: GroupWork,
    groups: Sequence[Sequence[Element]],
    receive: Receive | None = None,
    seconds: float | None = None,
) -> Any:
    """Run a job with another runner, which may retry each element.

    Args:
        job: name of the job.
        context: the runner, its options, and the stage as the namespace of the
            counters.
        work: runs the tasks of one element. Each mapping that it yields is counted;
            each pair of a number and bytes goes to `receive` after all elements are
            done.
        groups: all elements.
        receive: receives a number and all bytes yielded with it, in any order; may be
            retried too.
        seconds: time limit of the job, or None.

    Raises:
        WorkerError: the cluster or the job server does not answer.
        TimeoutError: the job exceeded its time limit.
        MissingEngineError: the engine is not on this machine.
    """
    beam = import_beam()
    engine = context.beam
    runner = engine.runner
    options: EngineOptions = engine.options
    if runner == "local":
        runner = LOCAL_OPTIONS["runner"]
        options = LOCAL_OPTIONS
    if runner == "dask":
        # one partition per task instead of Beam's default of one per 128
        address = {"dask_client_address": engine.address} if engine.address else {}
        options = {**address, "dask_npartitions": len(groups), **options}
        check_cluster(options, engine.worker_seconds)
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
    with loopback_only(options):
        if runner == "spark":
            from apache_beam import Pipeline

            from gristmill.dataprep.runners.spark import ChainRunner

            chain_runner = ChainRunner(
                str(engine.address), engine.options, engine.worker_seconds
            )
            pipeline = without_folder(Pipeline(runner=chain_runner))
        else:
            name = BEAM_NAMES.get(runner, runner)
            pipeline = make_pipeline({**options, "runner": name})
        created = pipeline | f"{job}: shards" >> beam.Create(groups)
        outputs = created | f"{job}: process" >> carry_step(
            partial(_do_group, context.stage, work)
        ).with_output_types(tuple[int, bytes])
        if receive is not None:
            grouped = outputs | f"{job}: shuffle" >> beam.GroupByKey()
            _ = grouped | f"{job}: receive" >> carry_step(partial(_receive, receive))
        return run_pipeline(pipeline, seconds)


def _do_all(
    stage: str, pool: Pool, work: Work, elements: Sequence[Element], _impulse: bytes
) -> Iterator[None]:
    from apache_beam.runners.worker import statesampler

    # There is only one step, and the sampler's end waits up to 0.2 s for the last
    # sample.
    if (sampler := statesampler.get_current_tracker()) is not None:
        sampler.stop_if_still_running()
        statesampler.set_current_tracker(sampler)  # counters need it
    for counts in pool(work, elements):
        count(stage, counts)
        yield None


def _do_group(
    stage: str, work: GroupWork, group: Sequence[Element]
) -> Iterator[tuple[int, bytes]]:
    for output in work(group):
        if isinstance(output, Mapping):
            count(stage, output)
        else:
            yield output


def _receive(receive: Receive, grouped: tuple[int, Iterable[bytes]]) -> Iterator[None]:
    receive(*grouped)
    yield None


def count(stage: str, counts: Counts) -> None:
    """Add the decisions of a task to Beam counters: documents read, kept and
    quarantined, and dropped by each rule.
    """
    from apache_beam.metrics import Metrics

    for key in ("read", "kept", "quarantined"):
        Metrics.counter(stage, key).inc(counts.get(key, 0))
    for rule, number in counts.get("dropped", {}).items():
        Metrics.counter(stage, rule).inc(number)


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
    return without_folder(
        Pipeline(options=PipelineOptions.from_dictionary(dict(options)))
    )


def without_folder(pipeline: Any) -> Any:
    """Remove a pipeline's temporary folder for transforms in other languages, which a
    killed run would leave behind.
    """
    Path(pipeline.local_tempdir).rmdir()
    return pipeline


def run_pipeline(pipeline: Any, seconds: float | None = None) -> Any:
    """Run a linear pipeline to its end; returns Beam's result.

    Raises:
        TimeoutError: the pipeline did not end within `seconds`.
    """
    check_linear(pipeline)
    result = pipeline.run()
    if seconds is not None:
        wait_no_longer(result, seconds)
    wait_for(result)
    return result


def check_linear(pipeline: Any) -> None:
    """Raise NotLinearError unless every step of a Beam pipeline has one input, one
    output and one consumer.

    Beam's Dask runner, for example, computes only the last branch of a pipeline, sends
    all elements to every tagged output, and drops elements that a DoFn yields in
    `finish_bundle`, all without an error.

    Raises:
        NotLinearError: a second source, branch or sink; a tagged output; a side input;
            a DoFn that finishes bundles.
    """
    from apache_beam import DoFn
    from apache_beam.pipeline import PipelineVisitor

    consumers: dict[Any, str] = {}
    sources: list[str] = []

    class Visitor(PipelineVisitor):
        """Visitor of the primitive steps inside of composites."""

        def visit_transform(self, step: Any) -> None:
            inputs = [value for value in step.inputs if value.producer is not None]
            shared = [value for value in inputs if value in consumers]
            function: Any = getattr(step.transform, "fn", None)
            kind = type(function)
            problem = None
            if len(step.inputs) > 1:
                problem = f"has {len(step.inputs)} inputs"
            elif set(step.outputs) - {None, "None"}:
                outputs = ", ".join(sorted(map(str, step.outputs)))
                problem = f"has tagged outputs ({outputs})"
            elif step.side_inputs:
                problem = "has side inputs"
            elif (
                isinstance(function, DoFn)
                and kind.finish_bundle is not DoFn.finish_bundle
            ):
                problem = (
                    f"has a DoFn that finishes bundles ({kind.__name__}.finish_bundle)"
                )
            elif shared:
                problem = f"reads what {consumers[shared[0]]!r} reads too"
            if problem is not None:
                raise NotLinearError(f"the step {step.full_label!r} {problem}; {RULE}")
            sources.extend([] if inputs else [step.full_label])
            consumers.update(dict.fromkeys(inputs, step.full_label))

    pipeline.visit(Visitor())
    if len(sources) > 1:
        raise NotLinearError(
            f"the pipeline has {len(sources)} sources ({', '.join(sources)}); {RULE}"
        )


@contextmanager
def loopback_only(options: EngineOptions) -> Iterator[None]:
    """Context in which servers that Beam starts in this process listen on 127.0.0.1
    only.

    A job server inside of this process (`job_endpoint: embed`) and workers inside of it
    (`environment_type: LOOPBACK`) run any code sent to them. Beam binds both to all
    interfaces without authentication, and neither Beam nor gRPC has an option for it,
    so `grpc.server` is replaced (docs/patched.md).
    """
    if (
        options.get("job_endpoint") != EMBEDDED
        and options.get("environment_type") != LOOPBACK
    ):
        yield
        return
    with listening_on("127.0.0.1"):
        yield


@contextmanager
def listening_on(host: str) -> Iterator[None]:
    """Context in which gRPC servers that bind to all interfaces listen on one address
    instead.
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
    """Wait for a pipeline with a time limit; returns immediately on Dask, which has no
    state before the end.

    Raises:
        TimeoutError: the pipeline did not end in time and was cancelled.
    """
    deadline = time.monotonic() + seconds
    while result.state not in ENDED and getattr(result, "client", None) is None:
        if time.monotonic() > deadline:
            result.cancel()
            raise TimeoutError(f"the job was still {result.state} after {seconds:g} s")
        time.sleep(POLL_SECONDS)


def check_cluster(options: EngineOptions, worker_seconds: float) -> None:
    """Raise WorkerError unless the scheduler answers and has a worker in time.

    Args:
        options: with `dask_client_address` or `dask_scheduler_file`.
        worker_seconds: timeout for the first worker.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise WorkerError(
            "engine.runner is dask, which is not installed; install it with: pip "
            "install 'gristmill[engines]'"
        ) from error
    address = options.get("dask_client_address")
    file = options.get("dask_scheduler_file")
    where = address or file
    try:
        client = Client(
            address=address,
            scheduler_file=file,
            timeout=CONNECT_SECONDS,
            set_as_default=False,
        )
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"no Dask scheduler answers at {where} ({type(error).__name__}: {error}); "
            "start one with `dask scheduler`, or correct engine.address"
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=worker_seconds)
        except TimeoutError as error:
            raise WorkerError(
                f"the Dask scheduler at {where} has no worker after {worker_seconds:g} "
                f"s (engine.worker_seconds); start some with `dask worker {where}`"
            ) from error


def wait_for(result: Any) -> None:
    """Wait for the end of a pipeline, and disconnect from the Dask cluster if it ran
    there.

    Raises:
        WorkerError: the cluster gave up on a task after its workers died, or the
            scheduler ended.
    """
    client = getattr(result, "client", None)
    try:
        result.wait_until_finish()
        # Beam treats a lost future as done.
        if client is not None and any(
            future.status != "finished" for future in result.futures
        ):
            raise WorkerError(
                "the Dask scheduler ended, or the job was cancelled "
                "there; rerun to do what is missing"
            )
    except (KeyboardInterrupt, SystemExit):
        if client is None:
            result.cancel()
        raise
    except Exception as error:
        if type(error).__name__ != "KilledWorker":
            raise
        raise WorkerError(
            f"the Dask cluster gave up: {error} Most likely a shard needs more memory."
        ) from error
    finally:
        if client is not None:
            client.cancel(result.futures)
            client.close()
