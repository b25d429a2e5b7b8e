"""Telling a Prefect server of the runs that were kept for one: by a few requests of its API, without Prefect's engine.

What it shows is the same as of a run that it watched: the flow run with its parameters, a task for each stage, drawn
behind those that it reads, with the times at which it began and ended, the log, the cards. (The flow run itself has
the times at which the server was told; its last state names the true ones.) A run that still goes on is told as far as
it is, and can be cancelled there; one whose process is gone has crashed.
"""

from __future__ import annotations

import base64
import fcntl
import http.client
import json
import logging
import os
import signal
import threading
import time
import uuid
from contextlib import closing, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gristmill.dataprep.files import read_json, write_json
from gristmill.flows.orchestration.kept_runs import Line, kept_files
from gristmill.flows.orchestration.owners import CANCELLED, LABEL
from gristmill.flows.orchestration.server_settings import CLIENT_VARIABLE, prefect_setting
from gristmill.flows.store.lease import is_alive, is_gone

REQUEST_SECONDS = 10.0
BUSY_SECONDS = (0.2, 0.5, 1.0)
"""Pauses before a server is asked again whose database was locked by somebody else, as it is while it starts."""
LOOK_SECONDS = 2.0
LOGGER = "prefect.flow_runs"
LINES = 200
"""Of the log, in a request."""
log = logging.getLogger("gristmill.kept-runs")


def keep_telling(api: str) -> None:
    """From now on tell a server of what is kept every `LOOK_SECONDS`, on a thread of its own."""

    def work() -> None:
        while True:
            tell_kept_quietly(api, logging.DEBUG)
            time.sleep(LOOK_SECONDS)

    threading.Thread(target=work, daemon=True, name="kept-runs").start()


def tell_kept_quietly(api: str, level: int = logging.WARNING) -> None:
    """Tell a server of all kept runs, where one that does not take them is no reason to stop."""
    try:
        tell_kept(api)
    except (OSError, http.client.HTTPException, ValueError) as error:
        log.log(level, "kept runs are not shown in Prefect yet: %s", error)


def tell_kept(api: str) -> None:
    """Tell a server of all kept runs what it has not been told.

    Raises:
        OSError: it does not answer, or refuses.
    """
    files = kept_files()
    if not files:
        return
    with closing(_Requests(api)) as server:
        for path in files:
            with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:  # else somebody else tells it
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _Telling(server, path).go_on()


class _Telling:
    """One run, of which a server has perhaps been told a part; how much is written down beside its file."""

    def __init__(self, server: _Requests, path: Path) -> None:
        self._server, self._path = server, path
        self._place = path.with_suffix(".told")
        self._ids = uuid.uuid5(uuid.NAMESPACE_OID, path.stem)
        """Makes the ids of its tasks and of their states: what is told twice is known."""

    def go_on(self) -> None:
        """Tell what has been written since, and forget the run when it is over."""
        with self._path.open("rb") as file:
            head = _parse(file.readline())
            if not head:
                return  # it begins this very moment
            self._head = head[0]
            gone = is_gone(self._head["owner"])  # asked before the rest is read: what is there then is all
            told = read_json(self._place) if self._place.exists() else {"bytes": file.tell(), "asked": False}
            file.seek(told["bytes"])
            content = file.read()
        lines = _parse(content)
        if gone and not any("end" in line for line in lines):
            lines += self._crash()
        run, cancelled = self._make_run()
        self._tell_states(run, lines, cancelled)
        self._tell_log(run, lines)
        self._tell_cards(run, lines)
        end = next((line for line in lines if "end" in line), None)
        if end is not None:
            self._tell_end(run, end, cancelled)
            for path in (self._path, self._place):
                path.unlink(missing_ok=True)
            return
        asks = cancelled and not told["asked"]
        if lines or asks:
            place = told["bytes"] + content.rfind(b"\n") + 1
            write_json(self._place, {"bytes": place, "asked": told["asked"] or asks}, durable=False)
        if asks and is_alive(self._head["owner"]):
            os.kill(self._head["owner"]["pid"], signal.SIGTERM)

    def _crash(self) -> list[Line]:
        """What the run would have written, had its process not been killed."""
        states = {line["task"]: line for line in _parse(self._path.read_bytes()) if "state" in line}
        message, now = f"Its process ({self._head['owner']['pid']}) is gone.", time.time()
        left = [
            {**line, "state": "CRASHED", "name": "Crashed", "message": message, "at": now}
            for line in states.values()
            if line["state"] == "RUNNING"
        ]
        return [*left, {"end": "CRASHED", "message": message, "at": now}]

    def _make_run(self) -> tuple[str, bool]:
        """The flow run, made unless it is there; and whether it is to be cancelled."""
        head = self._head
        flow = self._server.post("/flows/", {"name": head["flow"]})["id"]
        owner = {f"{LABEL}{name}": head["owner"][name] for name in ("host", "pid")}
        run = self._server.post(
            "/flow_runs/",
            {
                "flow_id": flow,
                "name": head["name"],
                "parameters": head["parameters"],
                "labels": owner,
                "idempotency_key": self._path.stem,
                "state": {"type": "RUNNING", "name": "Running", "message": f"It began at {_clock(head['at'])}."},
            },
        )
        return run["id"], run.get("state_type") in ("CANCELLING", "CANCELLED")

    def _task_id(self, task: str) -> str:
        return str(uuid.uuid5(self._ids, task))

    def _of(self, task: str | None) -> dict[str, str]:
        return {} if task is None else {"task_run_id": self._task_id(task)}

    def _tell_states(self, run: str, lines: list[Line], cancelled: bool) -> None:
        """Tell what became of tasks as Prefect's own engine does: by events, which have the times of the states."""
        events = []
        for line in lines:
            if "state" not in line:
                continue
            if cancelled and line["state"] == "CRASHED":
                line = {**line, "state": "CANCELLED", "name": "Cancelled", "message": CANCELLED}
            task, needs = line["task"], self._head["tasks"][line["task"]]
            needed = [{"input_type": "task_run", "id": self._task_id(name)} for name in needs]
            ended = (
                {}
                if line["state"] == "RUNNING"
                else {"end_time": _iso(line["at"]), "total_run_time": line["at"] - line["began"]}
            )
            events.append(
                {
                    "id": str(uuid.uuid5(self._ids, f"{task}: {line['state']}")),
                    "occurred": _iso(line["at"]),
                    "event": f"prefect.task-run.{line['name']}",
                    "resource": {
                        "prefect.resource.id": f"prefect.task-run.{self._task_id(task)}",
                        "prefect.resource.name": task,
                        "prefect.orchestration": "client",
                    },
                    "related": [
                        {"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.role": "flow-run"}
                    ],
                    "payload": {
                        "validated_state": {"type": line["state"], "name": line["name"], "message": line["message"]},
                        "task_run": {
                            "name": task,
                            "task_key": "run_stage",
                            "dynamic_key": task,
                            "tags": [f"stage:{task}"],
                            "task_inputs": {"wait_for": needed} if needed else {},
                            "run_count": 1,
                            "flow_run_run_count": 1,
                            "start_time": _iso(line["began"]),
                            **ended,
                        },
                    },
                }
            )
        if events:
            self._server.post("/events", events)

    def _tell_log(self, run: str, lines: list[Line]) -> None:
        entries = [
            {
                "name": LOGGER,
                "level": line["level"],
                "message": line["log"],
                "timestamp": _iso(line["at"]),
                "flow_run_id": run,
                **self._of(line["task"]),
            }
            for line in lines
            if "log" in line
        ]
        for first in range(0, len(entries), LINES):
            self._server.post("/logs/", entries[first : first + LINES])

    def _tell_cards(self, run: str, lines: list[Line]) -> None:
        for line in lines:
            if "card" in line:
                self._server.post(
                    "/artifacts/",
                    {
                        "key": line["key"],
                        "type": "markdown",
                        "data": line["card"],
                        "description": line["description"],
                        "flow_run_id": run,
                        **self._of(line["task"]),
                    },
                )

    def _tell_end(self, run: str, end: Line, cancelled: bool) -> None:
        kind, why = end["end"], end["message"]
        if cancelled and kind == "CRASHED":
            kind, why = "CANCELLED", CANCELLED
        times = f"{_clock(self._head['at'])} to {_clock(end['at'])}"
        self._server.post(
            f"/flow_runs/{run}/set_state",
            {
                "force": True,
                "state": {"type": kind, "name": kind.capitalize(), "message": f"{times}: {why}" if why else times},
            },
        )


def _parse(content: bytes) -> list[Line]:
    """The lines that are whole."""
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


class _Requests:
    """A connection to Prefect's API that asks question after question."""

    def __init__(self, api: str) -> None:
        place = urlsplit(api.rstrip("/"))
        connect = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        self._connection = connect(place.netloc, timeout=REQUEST_SECONDS)
        self._path = place.path
        self._headers = {"Content-Type": "application/json"}
        if password := os.environ.get(CLIENT_VARIABLE) or prefect_setting(CLIENT_VARIABLE):
            self._headers["Authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"

    def post(self, path: str, body: Any) -> Any:
        """The answer to a question.

        Raises:
            OSError: there is none, or it is no success.
        """
        content = json.dumps(body).encode()
        for pause in (*BUSY_SECONDS, None):
            self._connection.request("POST", self._path + path, content, self._headers)
            answer = self._connection.getresponse()
            said = answer.read()
            if answer.status != HTTPStatus.SERVICE_UNAVAILABLE or pause is None:
                break
            time.sleep(pause)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise OSError(f"{path}: {answer.status} {answer.reason}: {said[:300].decode(errors='replace')}")
        return json.loads(said or b"null")

    def close(self) -> None:
        """End it."""
        self._connection.close()
