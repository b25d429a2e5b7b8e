"""Beam pipelines of a job: only linear chains, and a job server that answers."""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import grpc
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.runners import runner
from gristmill.dataprep.runners.errors import WorkerError, shorten
from gristmill.dataprep.runners.runner import NotLinearError, check_linear, import_beam
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.mixtures.sections.engine import BeamEngine


def test_silent_job_server_is_named_after_its_timeout(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        options = {"job_endpoint": endpoint, "job_server_timeout": 0.2}
        context = Context(
            tmp_path,
            beam=BeamEngine(runner="PortableRunner", options=options),
            emit=lambda event: None,
        )
        with pytest.raises(WorkerError, match=rf"{endpoint} .*0\.2 s"):
            run_tasks("job", [Task("a")], lambda task: Done(), context)


class FailedCall(grpc.RpcError):
    """Stand-in for gRPC's error, which cannot be constructed without a call."""

    def __str__(self) -> str:
        return (
            f"<{type(self).__name__} of RPC that terminated with:\n\tstatus = "
            "StatusCode.UNKNOWN\n>"
        )

    def details(self) -> str:
        return "Application error processing RPC"


def test_failed_call_is_shortened_to_its_details() -> None:
    assert (
        str(shorten("job", FailedCall()))
        == "job: FailedCall: Application error processing RPC"
    )


@pytest.mark.parametrize(
    ("file", "is_logged"), [("portable_runner.py", False), ("own_steps.py", True)]
)
def test_log_of_the_portable_runner_is_suppressed(file: str, is_logged: bool) -> None:
    import_beam()
    record = logging.LogRecord(
        "root", logging.ERROR, f"/somewhere/{file}", 1, "message", None, None
    )
    assert bool(logging.getLogger().filter(record)) == is_logged


class Collects(beam.DoFn):
    def process(self, element: int) -> Iterator[int]:  # type: ignore[override]
        yield element

    def finish_bundle(self) -> Iterator[int]:  # type: ignore[override]
        yield 1


def numbers(pipeline: Any) -> Any:
    return pipeline | "numbers" >> beam.Create([1, 2, 3])


def two_sinks(pipeline: Any) -> None:
    collection = numbers(pipeline)
    _ = collection | "one" >> beam.Map(print)
    _ = collection | "other" >> beam.Map(print)


def two_sources(pipeline: Any) -> None:
    numbers(pipeline)
    _ = pipeline | "more" >> beam.Create([4])


def flattened(pipeline: Any) -> None:
    _ = (
        numbers(pipeline),
        pipeline | "more" >> beam.Create([4]),
    ) | "both" >> beam.Flatten()


def tagged(pipeline: Any) -> None:
    _ = numbers(pipeline) | "split" >> beam.ParDo(lambda n: [n]).with_outputs(
        "even", main="odd"
    )


def side_input(pipeline: Any) -> None:
    collection = numbers(pipeline)
    _ = (
        pipeline
        | "more" >> beam.Create([4])
        | "add" >> beam.Map(lambda n, others: n, beam.pvalue.AsList(collection))
    )


def finishing(pipeline: Any) -> None:
    _ = numbers(pipeline) | "collect" >> beam.ParDo(Collects())


def batching(pipeline: Any) -> None:
    _ = numbers(pipeline) | "batch" >> beam.BatchElements()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (two_sinks, "'other.*'one"),
        (two_sources, "2 sources"),
        (flattened, "'both' .*2 inputs"),
        (tagged, r"'split.*tagged outputs \(.*even"),
        (side_input, "'add.*side inputs"),
        (finishing, r"'collect' .*Collects\.finish_bundle"),
        (batching, "finish"),
    ],
)
def test_nonlinear_pipeline_is_rejected(
    build: Callable[[Any], None], message: str
) -> None:
    pipeline = beam.Pipeline()
    build(pipeline)
    with pytest.raises(NotLinearError, match=message):
        check_linear(pipeline)


def test_chain_with_a_shuffle_is_linear() -> None:
    pipeline = beam.Pipeline()
    _ = (
        numbers(pipeline)
        | beam.Map(lambda n: (n % 2, n))
        | beam.GroupByKey()
        | beam.Map(print)
    )
    check_linear(pipeline)


def test_pipeline_creates_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner.make_pipeline(runner.LOCAL_OPTIONS)
    assert list(tmp_path.iterdir()) == []
