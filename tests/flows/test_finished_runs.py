"""What Prefect is told of a run that found everything committed: at once, or when a server is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.orchestration import finished_runs
from gristmill.flows.orchestration.finished_runs import record_run, send_kept_quietly
from gristmill.flows.orchestration.server_settings import CLIENT_VARIABLE


class Api(ThreadingHTTPServer):
    """Answers as Prefect does, and remembers what it was asked; refuses from a request on, where told so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
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
        answer = json.dumps({"id": f"id-{body.get('name', 'none')}"}).encode()
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
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def finish(tmp_path: Path, api: str | None, secret: str = "a=b") -> None:
    plan = {"ingest": SimpleNamespace(inputs={}), "filter": SimpleNamespace(inputs={"ingest": "f"})}
    session: Any = SimpleNamespace(overrides=[secret], store_option=None, plan=plan, manifest_file="a.yaml",
                                   manifest=SimpleNamespace(name="a"))
    stages = {stage: {"how": "Cached", "folder": f"store/{stage}"} for stage in plan}
    record: Any = SimpleNamespace(folder=tmp_path / "run", content={"started": 0.0, "state": "completed",
                                                                    "stages": stages})
    record_run(session, list(plan), record, api)


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "prefect" / finished_runs.FOLDER).glob("*"))


def test_a_server_hears_of_the_run_its_tasks_and_what_each_waited_for(api: Api, tmp_path: Path) -> None:
    finish(tmp_path, api.address, "sources.a.licence=https://me:hunter2@example.org/x")
    paths = [path for path, _, _ in api.asked]
    assert paths == ["/api/flows/", "/api/flow_runs/", "/api/task_runs/", "/api/task_runs/", "/api/artifacts/",
                     "/api/flow_runs/id-a.yaml/set_state"]
    bodies = [body for _, body, _ in api.asked]
    assert bodies[0] == {"name": "gristmill"}
    assert bodies[1]["parameters"]["overrides"] == ["sources.a.licence=https://***@example.org/x"]
    assert [(task["name"], task["state"]["name"], task["task_inputs"]) for task in bodies[2:4]] == [
        ("ingest", "Cached", {}), ("filter", "Cached", {"wait_for": [{"input_type": "task_run", "id": "id-ingest"}]})]
    assert bodies[5]["state"]["type"] == "COMPLETED"
    assert {password for _, _, password in api.asked} == {"Basic bWU6d29yZA=="}
    assert kept(tmp_path) == []


def test_what_no_server_was_told_of_waits_for_one_and_is_told_once(api: Api, tmp_path: Path) -> None:
    finish(tmp_path, None)
    finish(tmp_path, None)
    assert (len(kept(tmp_path)), api.asked) == (2, [])
    api.refuse_from = 8  # the second run is told of in part
    send_kept_quietly(api.address)
    assert len(kept(tmp_path)) == 1
    api.refuse_from = 1000
    send_kept_quietly(api.address)
    keys = [body["idempotency_key"] for path, body, _ in api.asked if path == "/api/flow_runs/"]
    assert (len(keys), len(set(keys)), kept(tmp_path)) == (3, 2, [])


def test_a_server_that_is_gone_stops_nothing_and_only_the_newest_are_kept(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_runs, "MOST_KEPT", 3)
    for _ in range(5):
        finish(tmp_path, "http://127.0.0.1:9/api")
    assert len(kept(tmp_path)) == 3
