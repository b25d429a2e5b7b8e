"""What Prefect is told of a run that no server watched: when one is there."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.orchestration import kept_runs, tell_server
from gristmill.flows.orchestration.kept_runs import KeptObserver, KeptRun, keep_run
from gristmill.flows.orchestration.server_settings import CLIENT_VARIABLE
from gristmill.flows.orchestration.tell_server import tell_kept, tell_kept_quietly
from gristmill.flows.running.run import RunStoppedError


class Api(ThreadingHTTPServer):
    """Answers as Prefect does, and remembers what it was asked; refuses from a request on, where told so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, str | None]] = []
        self.state = "RUNNING"
        self.refuse_from = 1000
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}/api"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert isinstance(self.server, Api)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refused = len(self.server.asked) >= self.server.refuse_from
        if not refused:
            self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        name = body.get("name", "none") if isinstance(body, dict) else "none"
        answer = json.dumps({"id": f"id-{name}", "state_type": self.server.state}).encode()
        self.send_response(503 if refused else 201)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv(CLIENT_VARIABLE, "me:word")
    monkeypatch.setattr(tell_server, "BUSY_SECONDS", (0.0,))
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def begin(secret: str = "a=b") -> KeptRun:
    plan = {"ingest": SimpleNamespace(inputs={}), "filter": SimpleNamespace(inputs={"ingest": "f"})}
    session: Any = SimpleNamespace(
        overrides=[secret], store_option=None, plan=plan, manifest_file="a.yaml", manifest=SimpleNamespace(name="a")
    )
    return keep_run(session, list(plan), frozenset())


def finish(kept: KeptRun) -> None:
    for stage in ("ingest", "filter"):
        kept.task(stage, lambda: None)
    kept.card("gristmill-run", "# a", "summary of a")
    kept.end("completed")


def files(tmp_path: Path) -> list[str]:
    return sorted(path.suffix for path in (tmp_path / "prefect" / kept_runs.FOLDER).glob("*"))


def asked(api: Api, path: str) -> list[Any]:
    return [body for of, body, _ in api.asked if of == f"/api{path}"]


def states(api: Api) -> list[tuple[str, str]]:
    """What a server was told of tasks, in order."""
    return [
        (event["payload"]["task_run"]["name"], event["payload"]["validated_state"]["name"])
        for events in asked(api, "/events")
        for event in events
    ]


def test_a_server_hears_of_a_run_its_tasks_with_their_times_and_what_each_waited_for(api: Api, tmp_path: Path) -> None:
    kept = begin("sources.a.licence=https://me:hunter2@example.org/x")
    shown: Any = KeptObserver(kept, SimpleNamespace())
    shown.show_line("ingest", "a line")
    finish(kept)
    tell_kept(api.address)
    assert [path.removeprefix("/api/") for path, _, _ in api.asked] == [
        "flows/",
        "flow_runs/",
        "events",
        "logs/",
        "artifacts/",
        "flow_runs/id-a.yaml/set_state",
    ]
    assert asked(api, "/flows/") == [{"name": "gristmill"}]
    assert asked(api, "/flow_runs/")[0]["parameters"]["overrides"] == ["sources.a.licence=https://***@example.org/x"]
    (events,) = asked(api, "/events")
    assert states(api) == [(stage, state) for stage in ("ingest", "filter") for state in ("Running", "Completed")]
    first, last = events[1], events[3]
    assert first["resource"]["prefect.resource.id"] == events[0]["resource"]["prefect.resource.id"]
    needed = first["resource"]["prefect.resource.id"].removeprefix("prefect.task-run.")
    assert [event["payload"]["task_run"]["task_inputs"] for event in (first, last)] == [
        {},
        {"wait_for": [{"input_type": "task_run", "id": needed}]},
    ]
    times = [event["occurred"] for event in events]
    assert times == sorted(times)
    assert first["payload"]["task_run"]["start_time"] < first["payload"]["task_run"]["end_time"] == first["occurred"]
    ((line,),) = asked(api, "/logs/")
    assert (line["message"], line["task_run_id"]) == ("a line", needed)
    assert asked(api, "/flow_runs/id-a.yaml/set_state")[0]["state"]["type"] == "COMPLETED"
    assert {password for _, _, password in api.asked} == {"Basic bWU6d29yZA=="}
    assert files(tmp_path) == []


def test_what_no_server_was_told_of_waits_for_one_and_what_is_told_twice_has_the_same_ids(
    api: Api, tmp_path: Path
) -> None:
    for _ in range(2):
        finish(begin())
    assert (files(tmp_path), api.asked) == ([".jsonl"] * 2, [])
    api.refuse_from = 9  # the second run is told of in part
    with pytest.raises(OSError, match="503"):
        tell_kept(api.address)
    assert files(tmp_path) == [".jsonl"]
    api.refuse_from = 1000
    tell_kept_quietly(api.address)
    keys = [body["idempotency_key"] for body in asked(api, "/flow_runs/")]
    told = [[event["id"] for event in events] for events in asked(api, "/events")]
    assert (len(keys), len(set(keys)), files(tmp_path)) == (3, 2, [])
    assert told[0] != told[1] == told[2]


def test_a_run_that_goes_on_is_told_as_far_as_it_is_and_nothing_of_it_twice(api: Api, tmp_path: Path) -> None:
    kept = begin()
    kept.write({"log": "one", "level": 20, "task": "ingest", "at": 1.0})
    tell_kept(api.address)
    tell_kept(api.address)
    finish(kept)
    assert files(tmp_path) == [".jsonl", ".told"]
    tell_kept(api.address)
    assert [line["message"] for lines in asked(api, "/logs/") for line in lines] == ["one"]
    assert len(states(api)) == 4
    assert files(tmp_path) == []


def test_a_run_whose_process_was_killed_is_told_as_crashed_with_the_task_that_it_was_at(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = begin()
    kept.task("ingest", lambda: None)

    def be_killed() -> None:
        kept.sink = None  # nothing more is written

    kept.task("filter", be_killed)
    monkeypatch.setattr(tell_server, "is_gone", lambda owner: True)
    tell_kept(api.address)
    assert states(api)[2:] == [("filter", "Running"), ("filter", "Crashed")]
    (end,) = asked(api, "/flow_runs/id-a.yaml/set_state")
    assert (end["state"]["type"], files(tmp_path)) == ("CRASHED", [])


def test_a_run_that_is_cancelled_on_the_page_is_ended_once_and_shown_as_cancelled(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(tell_server.os, "kill", lambda *of: signals.append(of))
    kept = begin()

    def work() -> None:
        for state in ("RUNNING", "CANCELLING", "CANCELLING"):
            api.state = state
            tell_kept(api.address)
        raise RunStoppedError("the run was stopped")

    with pytest.raises(RunStoppedError):
        kept.task("ingest", work)
    kept.end("interrupted")
    tell_kept(api.address)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    assert states(api) == [("ingest", "Running"), ("ingest", "Cancelled")]
    assert asked(api, "/flow_runs/id-a.yaml/set_state")[0]["state"]["type"] == "CANCELLED"


def test_a_server_that_is_gone_stops_nothing_and_only_the_newest_are_kept(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_runs, "MOST_KEPT", 3)
    for _ in range(5):
        finish(begin())
        tell_kept_quietly("http://127.0.0.1:9/api")
    assert files(tmp_path) == [".jsonl"] * 3
