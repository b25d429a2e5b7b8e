"""OpenLineage events of runs and stages, received by a stand-in for a lineage server;
servers that hang, refuse or fail neither fail nor delay a run.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.files import read_json
from gristmill.flows.running.events import RunRecorded, StageStarted
from gristmill.flows.running.missing_libraries import (
    MissingLibraryError,
    check_libraries,
)
from gristmill.flows.running.recorded_run import RunRequest, run_recorded
from gristmill.flows.running.run import Runner, StageFailedError
from gristmill.flows.running.session import Session, open_session
from gristmill.mixtures.schema.engine import Engine
from tests.servers import free_port

pytest.importorskip("openlineage.client")
from gristmill.flows.running import lineage

Make = Callable[..., Runner]
TASK = "airflow/nightly.grind/01941f29-7c00-7087-8940-40e512c257bd"


@contextmanager
def serve(status: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve an endpoint that answers with a status; yields its address and the events
    that it gets.
    """
    events: list[dict[str, Any]] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            assert self.path == "/api/v1/lineage"
            events.append(json.loads(self.rfile.read(length)))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", events
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the user's configuration away; the client copies variables into others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for suffix in ("URL", "TYPE"):
        name = f"OPENLINEAGE__TRANSPORT__TRANSPORTS__DEFAULT_HTTP__{suffix}"
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


LINEAGE = Engine(lineage=True, retries=0)


def run(session: Session) -> None:
    run_recorded(RunRequest(session, list(session.plan), frozenset(), []))


def kinds(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(event["eventType"], event["job"]["name"]) for event in events]


def test_run_and_its_stages_start_and_complete(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = toy_runner(LINEAGE, first={"n": 1}, second={}).session
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "mills")
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", TASK)
    with serve(201) as (url, events):
        monkeypatch.setenv("OPENLINEAGE_URL", url)
        run(session)
    assert kinds(events) == [
        ("START", "toy"),
        ("START", "toy.first"),
        ("COMPLETE", "toy.first"),
        ("START", "toy.second"),
        ("COMPLETE", "toy.second"),
        ("COMPLETE", "toy"),
    ]
    whole, first, _, _, second, end = events
    assert {event["job"]["namespace"] for event in events} == {"mills"}
    assert whole["run"]["runId"] == end["run"]["runId"]
    assert whole["run"]["facets"]["parent"]["run"]["runId"] == TASK.rpartition("/")[2]
    assert whole["run"]["facets"]["parent"]["job"]["name"] == "nightly.grind"
    assert first["run"]["facets"]["parent"]["run"]["runId"] == whole["run"]["runId"]
    (source,) = second["inputs"]
    (output,) = second["outputs"]
    folder = str(session.store.root)
    assert (source["namespace"], source["name"]) == ("file", f"{folder}/first/toy")
    assert output["name"] == f"{folder}/second/toy"
    version = output["facets"]["version"]["datasetVersion"]
    assert version == session.plan["second"].fingerprint


def test_failed_stage_and_its_run_fail_with_the_message(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = toy_runner(LINEAGE, first={"n": 1}, failing={}).session
    with serve(201) as (url, events):
        monkeypatch.setenv("OPENLINEAGE_URL", url)
        for _ in range(2):
            with pytest.raises(StageFailedError):
                run(session)
    second_run = [
        ("START", "toy"),
        ("START", "toy.failing"),
        ("FAIL", "toy.failing"),
        ("FAIL", "toy"),
    ]
    assert kinds(events)[6:] == second_run  # `first` is reused
    for event in events[8:]:
        message = event["run"]["facets"]["errorMessage"]["message"]
        assert "the number 7 is not allowed" in message
        assert event["outputs"] == []


def test_interrupted_run_aborts_its_running_stages(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = toy_runner(LINEAGE, first={"n": 1}, second={}).session
    record = session.start_record()
    with serve(201) as (url, events):
        monkeypatch.setenv("OPENLINEAGE_URL", url)
        send = lineage.LineageSender(session, record.content)
        for node in session.plan.values():
            send(StageStarted(node, session.folder(node.name), False))
        record.finish("interrupted", "stopped")
        send(RunRecorded(record.folder, None))
    assert kinds(events)[3:] == [
        ("ABORT", "toy.second"),
        ("ABORT", "toy.first"),
        ("ABORT", "toy"),
    ]


def test_sources_are_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n{"text": "more"}\n')
    (tmp_path / "a.yaml").write_text(
        "name: a\nsources: {a: {path: a.jsonl}}\nengine: {lineage: true}"
    )
    session = open_session("a.yaml", [], str(tmp_path / "store"))
    with serve(201) as (url, events):
        monkeypatch.setenv("OPENLINEAGE_URL", url)
        run(session)
    assert events[2]["inputs"][0]["name"] == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("s3://bucket/a/*.parquet", ("s3://bucket", "a/*.parquet")),
        ("python-docs://", ("python-docs://", "/")),
        ("/a/b", ("file", "/a/b")),
        ("https://me:pa55word@host/a", ("https://***@host", "a")),
    ],
)
def test_datasets_are_named_by_the_conventions(
    location: str, name: tuple[str, str]
) -> None:
    assert lineage.dataset_name(location) == name


@pytest.mark.parametrize("trouble", ["hangs", "refuses", "fails", "parent"])
def test_broken_server_or_setting_does_not_fail_a_run(
    trouble: str,
    toy_runner: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = toy_runner(LINEAGE, first={"n": 1}).session
    monkeypatch.setattr(lineage, "LAST_SECONDS", 0.5)
    with serve(500) as (url, _), socket.create_server(("127.0.0.1", 0)) as silent:
        urls = {
            "hangs": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "refuses": f"http://127.0.0.1:{free_port()}",
            "fails": url,
            "parent": url,
        }
        monkeypatch.setenv("OPENLINEAGE_URL", urls[trouble])
        if trouble == "parent":
            monkeypatch.setenv("OPENLINEAGE_PARENT_ID", "not a parent")
        with caplog.at_level(logging.WARNING, "gristmill.lineage"):
            run(session)
    (folder,) = session.store.runs.iterdir()
    assert read_json(folder / "run.json")["state"] == "completed"
    assert "engine.lineage" in caplog.text


def test_end_of_a_run_waits_a_bounded_time_for_a_server_that_hangs(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = toy_runner(LINEAGE, first={"n": 1}, second={}).session
    record = session.start_record()
    record.finish("completed")
    monkeypatch.setattr(lineage, "LAST_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OPENLINEAGE_URL", address)
        send = lineage.LineageSender(session, record.content)
        started = time.monotonic()
        for node in session.plan.values():
            send(StageStarted(node, session.folder(node.name), False))
        assert time.monotonic() - started < 0.2
        send(RunRecorded(record.folder, None))
        assert 0.5 <= time.monotonic() - started < 5


def test_missing_client_is_refused_before_work(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = toy_runner(LINEAGE).session
    monkeypatch.setattr(
        "gristmill.flows.running.missing_libraries.is_installed",
        lambda library: library != "openlineage",
    )
    with pytest.raises(MissingLibraryError, match=r"gristmill\[lineage\]"):
        check_libraries(session, [])
