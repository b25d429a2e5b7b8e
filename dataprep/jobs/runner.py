"""Beam's part in a job: the runner that the manifest names, and one linear chain that does the tasks and may shuffle.

The local runner is Beam's own, in this process and in its one thread, with nothing added: the step hands its tasks to
the workers of this machine (`pool.py`). It is named explicitly, because Beam's default runner tries to download a
binary first. Any other runner gets an element per task, or per some of many tasks, and spreads them over its cluster;
what the tasks put out under a number it brings together (`shuffled.py`).

Dask's is made whole here: Beam's runner for it returns before the work is done, keeps its connection open for ever,
waits in silence where no worker comes, and counts nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gristmill.dataprep.context import Context
from gristmill.dataprep.jobs.carried import carry_step
from gristmill.dataprep.jobs.errors import WorkerError
from gristmill.dataprep.jobs.pool import Element, Pool, Work
from gristmill.dataprep.jobs.servers import answers
from gristmill.dataprep.processes import without_collection

TRACEBACK_LOGGERS = (
    "apache_beam.runners.common",
    "apache_beam.runners.worker.sdk_worker",
    "apache_beam.runners.worker.sdk_worker_main",
    "apache_beam.runners.worker.data_plane",
)
LOCAL_OPTIONS = {"runner": "FnApiRunner", "direct_running_mode": "in_memory"}
EMBEDDED = "embed"
"""Beam's word for a job server inside of this process."""
LOOPBACK = "LOOPBACK"
"""And for workers inside of it."""
ANSWER_SECONDS = 30.0
"""For a job server to answer, unless `job_server_timeout` says otherwise."""
BEAM_NAMES = {
    "dask": "apache_beam.runners.dask.dask_runner.DaskRunner",
    "flink": "PortableRunner",
    "dataflow": "DataflowRunner",
}
CONNECT_SECONDS = 15
"""For a Dask scheduler to answer."""
ENDED = ("DONE", "FAILED", "CANCELLED", "UPDATED", "DRAINED")
"""States of Beam's in which a job changes no more."""
POLL_SECONDS = 0.05
"""Between looks at a job that is given little time."""
GroupWork = Callable[[Sequence[Element]], Iterator[Mapping[str, Any] | tuple[int, bytes]]]
"""Does the tasks of an element: puts out what is to be counted, and what is to be shuffled."""
Receive = Callable[[int, Iterable[bytes]], None]
"""Takes what was shuffled to one number."""
RULE = "a job is one linear chain, because runners may silently lose anything else"


class NotLinearError(ValueError):
    """A pipeline is not one linear chain."""


def run_here(job: str, stage: str, pool: Pool, work: Work, elements: Sequence[Element]) -> Any:
    """Run a job by the local runner; returns Beam's result, which has the counters.

    Args:
        job: its name.
        stage: the namespace of its counters.
        pool: the workers that share the elements.
        work: does one element, and returns what is to be counted.
        elements: all of them.
    """
    beam = import_beam()
    pipeline = make_pipeline(LOCAL_OPTIONS)
    # Not beam.Create, which takes three steps more.
    _ = pipeline | beam.Impulse() | f"{job}: process" >> beam.FlatMap(partial(_do_all, stage, pool, work, elements))
    return run_pipeline(pipeline)


def run_there(
    job: str,
    context: Context,
    work: GroupWork,
    groups: Sequence[Sequence[Element]],
    receive: Receive | None = None,
    seconds: float | None = None,
) -> Any:
    """Run a job by another runner, which may retry each element.

    Args:
        job: its name.
        context: the runner, its options, and the stage as the namespace of the counters.
        work: does the tasks of one element. Each mapping that it puts out is counted; each pair of a number and bytes
            goes to `receive`, once all elements are done.
        groups: all elements.
        receive: takes a number and all bytes that were put out with it, in any order; may be retried too.
        seconds: how long the job may take; not limited if absent.

    Raises:
        WorkerError: the cluster, or the job server, does not answer.
        TimeoutError: the job took longer.
        MissingEngineError: the engine is not on this machine.
    """
    beam = import_beam()
    runner, options = context.runner, context.options
    if runner == "local":
        runner, options = LOCAL_OPTIONS["runner"], LOCAL_OPTIONS
    if runner == "dask":
        options = dask_options(context.address, len(groups), options)
        check_cluster(options, context.worker_seconds)
    endpoint = options.get("job_endpoint")
    if endpoint not in (None, EMBEDDED):
        check_job_server(endpoint, float(options.get("job_server_timeout", ANSWER_SECONDS)))
    if runner == "flink":
        from gristmill.dataprep.jobs.portable import flink_options

        options = flink_options(context.address, options)
    with loopback_only(options):
        pipeline = (
            on_spark(context)
            if runner == "spark"
            else make_pipeline({**options, "runner": BEAM_NAMES.get(runner, runner)})
        )
        made = pipeline | f"{job}: shards" >> beam.Create(groups)
        sent = made | f"{job}: process" >> carry_step(partial(_do_group, context.stage, work)).with_output_types(
            tuple[int, bytes]
        )
        if receive is not None:
            grouped = sent | f"{job}: shuffle" >> beam.GroupByKey()
            _ = grouped | f"{job}: receive" >> carry_step(partial(_receive, receive))
        return run_pipeline(pipeline, seconds)


def on_spark(context: Context) -> Any:
    """An empty pipeline for a Spark cluster."""
    from apache_beam import Pipeline

    from gristmill.dataprep.jobs.spark import ChainRunner

    return without_folder(Pipeline(runner=ChainRunner(str(context.address), context.options, context.worker_seconds)))


def _do_all(stage: str, pool: Pool, work: Work, elements: Sequence[Element], _impulse: bytes) -> Iterator[None]:
    _stop_sampling()
    for counts in pool(work, elements):
        count(stage, counts)
        yield None


def _stop_sampling() -> None:
    """Let Beam not ask which step this bundle is in: there is one, and its end waits for the last asking, up to 0.2 s."""
    from apache_beam.runners.worker import statesampler

    if (sampler := statesampler.get_current_tracker()) is not None:
        sampler.stop_if_still_running()
        statesampler.set_current_tracker(sampler)  # counters look for it


def _do_group(stage: str, work: GroupWork, group: Sequence[Element]) -> Iterator[tuple[int, bytes]]:
    for made in work(group):
        if isinstance(made, Mapping):
            count(stage, made)
        else:
            yield made


def _receive(receive: Receive, grouped: tuple[int, Iterable[bytes]]) -> Iterator[None]:
    receive(*grouped)
    yield None


def count(stage: str, counts: Mapping[str, Any]) -> None:
    """Count decisions as Beam counters: `stage/rule` for each rule that dropped a document, and what was read and kept."""
    from apache_beam.metrics import Metrics

    for key in ("read", "kept", "quarantined"):
        Metrics.counter(stage, key).inc(int(counts.get(key, 0)))
    for rule, number in counts.get("dropped", {}).items():
        Metrics.counter(stage, rule).inc(int(number))


def import_beam() -> Any:
    """Import Beam without its warnings about optional libraries, which concern nobody here, and the tracebacks that it
    logs: errors reach their reader otherwise.
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
    root.addFilter(_is_no_message)
    return apache_beam


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "apitools" not in record.getMessage()


def _is_no_message(record: logging.LogRecord) -> bool:
    """Not what a job server says, which is the error of a job that fails, and past where the engine goes on."""
    return record.module != "portable_runner"


def make_pipeline(options: Mapping[str, Any]) -> Any:
    """Make an empty Beam pipeline; its runner is one of the options."""
    from apache_beam import Pipeline
    from apache_beam.options.pipeline_options import PipelineOptions

    # The options of a runner are known only once Beam has imported it: given as flags, they wait for that.
    return without_folder(Pipeline(options=PipelineOptions.from_dictionary(dict(options))))


def without_folder(pipeline: Any) -> Any:
    """The pipeline without the temporary folder that Beam makes for transforms in other languages, and that a killed
    run would leave."""
    Path(pipeline.local_tempdir).rmdir()
    return pipeline


def run_pipeline(pipeline: Any, seconds: float | None = None) -> Any:
    """Run a pipeline that is one linear chain to its end; returns Beam's result.

    Raises:
        TimeoutError: it was given so many seconds, and has not ended.
    """
    check_linear(pipeline)
    result = pipeline.run()
    if seconds is not None:
        wait_no_longer(result, seconds)
    wait_for(result)
    return result


def check_linear(pipeline: Any) -> None:
    """Raise NotLinearError unless every step of a Beam pipeline has one input, one output and one consumer.

    Beam's Dask runner, for one, computes the last branch of a pipeline and no other, gives every tagged output
    everything, and drops what a DoFn yields when its bundle ends; all without an error.

    Raises:
        NotLinearError: a second source, branch or sink; a tagged output; a side input; a DoFn that finishes bundles.
    """
    from apache_beam.pipeline import PipelineVisitor

    consumers: dict[Any, str] = {}
    sources: list[str] = []

    class Visitor(PipelineVisitor):
        """Looks at the steps that do the work, inside whatever they are composed of."""

        def visit_transform(self, step: Any) -> None:
            _check_step(step)
            inputs = [value for value in step.inputs if value.producer is not None]
            if not inputs:
                sources.append(step.full_label)
            for value in inputs:
                if value in consumers:
                    _refuse(step, f"reads what {consumers[value]!r} reads too")
                consumers[value] = step.full_label

    pipeline.visit(Visitor())
    if len(sources) > 1:
        raise NotLinearError(f"the pipeline has {len(sources)} sources ({', '.join(sources)}); {RULE}")


def _check_step(step: Any) -> None:
    from apache_beam import DoFn

    if len(step.inputs) > 1:
        _refuse(step, f"has {len(step.inputs)} inputs")
    if set(step.outputs) - {None, "None"}:
        _refuse(step, f"has tagged outputs ({', '.join(sorted(str(tag) for tag in step.outputs))})")
    if step.side_inputs:
        _refuse(step, "has side inputs")
    function = getattr(step.transform, "fn", None)
    if isinstance(function, DoFn) and type(function).finish_bundle is not DoFn.finish_bundle:
        _refuse(step, f"has a DoFn that finishes bundles ({type(function).__name__}.finish_bundle)")


def _refuse(step: Any, why: str) -> NoReturn:
    raise NotLinearError(f"the step {step.full_label!r} {why}; {RULE}")


def check_job_server(endpoint: str, seconds: float) -> None:
    """Raise WorkerError unless a job server that somebody else started answers; Beam waits for five minutes, and then
    says nothing of it.
    """
    if not answers(endpoint, seconds):
        raise WorkerError(
            f"no job server answers at {endpoint} within {seconds:g} s; start it, or correct "
            "engine.options.job_endpoint (job_server_timeout waits longer)"
        )


@contextmanager
def loopback_only(options: Mapping[str, Any]) -> Iterator[None]:
    """Within it the servers that Beam starts in this process for a trial listen on 127.0.0.1.

    A job server inside of this process (`job_endpoint: embed`) and workers inside of it (`environment_type: LOOPBACK`)
    run what they are sent. Beam binds both to all interfaces, without authentication, and has no option for it, nor
    has gRPC: `grpc.server` is replaced meanwhile (docs/patched.md).
    """
    if options.get("job_endpoint") != EMBEDDED and options.get("environment_type") != LOOPBACK:
        yield
        return
    with listening_on("127.0.0.1"):
        yield


@contextmanager
def listening_on(host: str) -> Iterator[None]:
    """Within it gRPC's servers that would listen on all interfaces listen on one address."""
    import grpc

    original: Callable[..., Any] = grpc.server

    def server(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        add_insecure_port = made.add_insecure_port
        made.add_insecure_port = lambda address: add_insecure_port(
            address.replace("[::]:", f"{host}:").replace("0.0.0.0:", f"{host}:")
        )
        return made

    grpc.server = server
    try:
        yield
    finally:
        grpc.server = original


def wait_no_longer(result: Any, seconds: float) -> None:
    """Wait for a pipeline for so long at the most; not for one on Dask, which says nothing of it before it ends.

    Raises:
        TimeoutError: it has not ended, and is cancelled.
    """
    deadline = time.monotonic() + seconds
    while result.state not in ENDED and getattr(result, "client", None) is None:
        if time.monotonic() > deadline:
            result.cancel()
            raise TimeoutError(f"the job was still {result.state} after {seconds:g} s")
        time.sleep(POLL_SECONDS)


def dask_options(address: str | None, num_tasks: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of Beam's Dask runner: one partition per task, where its own default is one per 128."""
    found = {} if address is None else {"dask_client_address": address}
    return {**found, "dask_npartitions": num_tasks, **options}


def check_cluster(options: Mapping[str, Any], worker_seconds: float) -> None:
    """Raise WorkerError unless the scheduler answers and has a worker, or gets one soon.

    Args:
        options: with `dask_client_address` or `dask_scheduler_file`.
        worker_seconds: longest wait for the first worker.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise WorkerError(
            "engine.runner is dask, which is not installed; install it with: pip install 'gristmill[engines]'"
        ) from error
    address, file = options.get("dask_client_address"), options.get("dask_scheduler_file")
    where = address or file
    try:
        client = Client(address=address, scheduler_file=file, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"no Dask scheduler answers at {where} ({type(error).__name__}: {error}); start one with `dask scheduler`, "
            "or correct engine.address"
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=worker_seconds)
        except TimeoutError as error:
            raise WorkerError(
                f"the Dask scheduler at {where} has no worker after {worker_seconds:g} s (engine.worker_seconds); start "
                f"some with `dask worker {where}`"
            ) from error


def wait_for(result: Any) -> None:
    """Wait until a pipeline has ended, and let go of the Dask cluster, if it ran there.

    Raises:
        WorkerError: the cluster gave up on a task, because each worker that had it died; or its scheduler is gone.
    """
    client = getattr(result, "client", None)
    try:
        result.wait_until_finish()
        # Beam takes a future that was lost for one that is done.
        if client is not None and any(future.status != "finished" for future in result.futures):
            raise WorkerError("the Dask scheduler ended, or the job was cancelled there; rerun to do what is missing")
    except (KeyboardInterrupt, SystemExit):
        if client is None:
            result.cancel()
        raise
    except Exception as error:
        if type(error).__name__ != "KilledWorker":
            raise
        raise WorkerError(f"the Dask cluster gave up: {error} Most likely a shard needs more memory.") from error
    finally:
        if client is not None:
            client.cancel(result.futures)
            client.close()
