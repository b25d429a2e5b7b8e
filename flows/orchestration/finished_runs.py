"""Showing Prefect a run that found everything committed, when it is over: by a few requests of its API.

To import Prefect and carry each stage through its engine takes ten times as long as such a run. What is shown is the
same: the flow run with its parameters, a task for each stage, drawn behind those that it reads, and the run's card.
Where no server runs, what would be sent is kept in Prefect's folder, and goes to the first server that `gristmill up`
or a run of gristmill meets there.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gristmill.dataprep.files import read_json, write_json
from gristmill.dataprep.secrets import mask_secrets, mask_text
from gristmill.flows.orchestration.owners import LABEL
from gristmill.flows.orchestration.server_settings import CLIENT_VARIABLE, prefect_folder
from gristmill.flows.report.report_links import report_link
from gristmill.flows.running.session import Session
from gristmill.flows.store.lease import identity
from gristmill.flows.store.runs import RunRecord

FOLDER = "gristmill-runs"
"""In Prefect's own: what no server has been told of yet, a file per run."""
REQUEST_SECONDS = 10.0
MOST_KEPT = 100
"""The newest ones; a run says of older ones no more than it does itself."""
Told = dict[str, Any]
log = logging.getLogger("gristmill.finished-runs")


def record_run(session: Session, stages: list[str], record: RunRecord, api: str | None) -> None:
    """Show a run that has ended in Prefect, now or later; a server that does not take it now gets it later.

    Args:
        session, stages: what was run.
        record: of the run.
        api: address of the server that runs; None where none does.
    """
    folder = prefect_folder() / FOLDER
    try:
        write_json(folder / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json", describe(session, stages, record))
        for path in _kept(folder)[:-MOST_KEPT]:
            path.unlink(missing_ok=True)
    except OSError as error:  # the window may break; the run's record is in the store
        log.warning("this run is not shown in Prefect: %s", error)
        return
    if api is not None:
        send_kept_quietly(api)


def describe(session: Session, stages: list[str], record: RunRecord) -> Told:
    """What Prefect is told of a run, without credentials."""
    overrides, store = mask_secrets([list(session.overrides), session.store_option or ""])
    shown = {"manifest": session.manifest_file, "overrides": overrides, "store": store}
    single = len(stages) == 1 and list(session.plan) != stages
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.content["started"]))
    report = record.folder / "report.html"
    link = report_link(report)
    return {
        "flow": "gristmill-stage" if single else "gristmill",
        "name": mask_text(f"{stages[0]} of {session.manifest_file}" if single else session.manifest_file),
        "parameters": {**shown, **({"stage": stages[0], "force": False} if single else
                                   {"until": list(session.plan)[-1], "force": []})},
        "labels": {f"{LABEL}{name}": value for name, value in identity(os.getpid()).items() if value is not None},
        "message": f"{when}: {record.content['state']}",
        "tasks": [{"name": stage, "needs": [name for name in session.plan[stage].inputs if name in stages],
                   "state": record.content["stages"][stage]["how"],
                   "message": mask_text(record.content["stages"][stage]["folder"])} for stage in stages],
        "card": mask_text(f"# {session.manifest.name}\n\nEverything was committed already; nothing was made.\n\n"
                          + (f"[Open the report]({link}) (`{report}`)" if link else f"Report: `{report}`")),
    }


def send_kept(api: str) -> None:
    """Tell a server of all runs that none has been told of.

    Raises:
        OSError: it does not answer, or refuses.
    """
    waiting = _kept(prefect_folder() / FOLDER)
    if not waiting:
        return
    with closing(_Requests(api)) as server:
        for path in waiting:
            _send(server, read_json(path), path.stem)
            path.unlink(missing_ok=True)


def _kept(folder: Path) -> list[Path]:
    """The files that wait, oldest first."""
    return sorted(folder.glob("*.json")) if folder.exists() else []


def send_kept_quietly(api: str) -> None:
    """The same, where a server that does not take them is no reason to stop."""
    try:
        send_kept(api)
    except (OSError, http.client.HTTPException, ValueError) as error:
        log.warning("runs that made nothing are not shown in Prefect yet: %s", error)


def _send(server: _Requests, told: Told, key: str) -> None:
    """Make the flow run, its tasks and its card. What an interrupted attempt has made is found by the keys."""
    flow = server.post("/flows/", {"name": told["flow"]})["id"]
    run = server.post("/flow_runs/", {
        "flow_id": flow, "name": told["name"], "parameters": told["parameters"], "labels": told["labels"],
        "idempotency_key": key, "state": {"type": "RUNNING", "name": "Running"}})["id"]
    tasks: dict[str, str] = {}
    for task in told["tasks"]:
        needed = [{"input_type": "task_run", "id": tasks[name]} for name in task["needs"]]
        tasks[task["name"]] = server.post("/task_runs/", {
            "flow_run_id": run, "name": task["name"], "task_key": "run_stage", "dynamic_key": task["name"],
            "tags": [f"stage:{task['name']}"], "task_inputs": {"wait_for": needed} if needed else {},
            "state": {"type": "COMPLETED", "name": task["state"], "message": task["message"]}})["id"]
    server.post("/artifacts/", {"key": "gristmill-run", "type": "markdown", "data": told["card"], "flow_run_id": run,
                                "description": f"summary of {told['name']}"})
    server.post(f"/flow_runs/{run}/set_state", {
        "state": {"type": "COMPLETED", "name": "Completed", "message": told["message"]}, "force": True})


class _Requests:
    """A connection to Prefect's API that asks question after question."""

    def __init__(self, api: str) -> None:
        place = urlsplit(api.rstrip("/"))
        connect = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        self._connection = connect(place.netloc, timeout=REQUEST_SECONDS)
        self._path = place.path
        self._headers = {"Content-Type": "application/json"}
        if password := os.environ.get(CLIENT_VARIABLE):
            self._headers["Authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a question.

        Raises:
            OSError: there is none, or it is no success.
        """
        self._connection.request("POST", self._path + path, json.dumps(body).encode(), self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status >= http.client.BAD_REQUEST:
            raise OSError(f"{path}: {answer.status} {answer.reason}: {content[:300].decode(errors='replace')}")
        return json.loads(content)

    def close(self) -> None:
        """End it."""
        self._connection.close()
