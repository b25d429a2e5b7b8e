"""Beam pipelines of a job: only linear chains, and a job server that answers."""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import grpc
import pytest
from apache_beam.pipeline import PipelineVisitor

from gristmill.core.stage_context import Context
from gristmill.dataprep.runners import runner
from gristmill.dataprep.runners.errors import WorkerError, shorten
from gristmill.dataprep.runners.pool import Element, in_turn
from gristmill.dataprep.runners.runner import import_beam
from gristmill.dataprep.runners.servers import answers
from gristmill.dataprep.runners.ship_files import through
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.mixtures.schema.engine import BeamEngine


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


def test_distant_job_server_has_time_to_connect() -> None:
    settings = b"\0\0\0\x04\0\0\0\0\0"  # frames of HTTP/2 (RFC 9113)
    reset_first_call = b"\0\0\4\3\0\0\0\0\1\0\0\0\1"

    def respond_late() -> None:
        connection, _ = distant.accept()
        with connection:
            time.sleep(0.3)
            connection.sendall(settings)
            time.sleep(0.3)
            connection.sendall(reset_first_call)
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as distant:
        threading.Thread(target=respond_late, daemon=True).start()
        assert answers(f"127.0.0.1:{distant.getsockname()[1]}", 10)


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


class LinearVisitor(PipelineVisitor):
    """Visitor that asserts that every step inside of composites has at most one input,
    one output and one consumer.
    """

    def __init__(self) -> None:
        self.num_sources = 0
        self.consumed: set[Any] = set()

    def visit_transform(self, step: Any) -> None:
        inputs = {value for value in step.inputs if value.producer is not None}
        assert len(step.inputs) <= 1
        assert not step.side_inputs
        assert set(step.outputs) <= {None, "None"}
        assert not inputs & self.consumed
        function = getattr(step.transform, "fn", None)
        if isinstance(function, beam.DoFn):
            assert type(function).finish_bundle is beam.DoFn.finish_bundle
        self.num_sources += not inputs
        self.consumed |= inputs


def send_nothing(group: Sequence[Element]) -> Iterator[tuple[int, bytes]]:
    yield 0, b""


def test_logs_are_filtered_once_however_many_jobs_run() -> None:
    import_beam()
    filters = list(logging.getLogger().filters)
    import_beam()
    assert logging.getLogger().filters == filters


def test_every_pipeline_is_one_linear_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines: list[Any] = []
    monkeypatch.setattr(
        runner, "run_pipeline", lambda pipeline, *_: pipelines.append(pipeline)
    )
    context = Context(tmp_path, emit=lambda event: None)
    elements: list[Element] = [("a", {})]
    runner.run_here("job", in_turn, lambda name, payload: None, elements)
    for receive in (None, lambda number, content: None):
        runner.run_there("job", context, send_nothing, [elements], receive)
        with through(tmp_path):
            runner.run_there("job", context, send_nothing, [elements], receive)
    assert len(pipelines) == 5
    for pipeline in pipelines:
        visitor = LinearVisitor()
        pipeline.visit(visitor)
        assert visitor.num_sources == 1


def test_pipeline_creates_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner.make_pipeline(runner.LOCAL_OPTIONS)
    assert list(tmp_path.iterdir()) == []
