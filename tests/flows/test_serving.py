"""Prefect's server: runs appear in it, deployments run requests of its API, and runs
need no server.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gristmill.flows.prefect.deployments import (
    ManifestOnOffer,
    find_manifests,
    make_deployments,
)
from gristmill.flows.prefect.server_settings import password_file, server_password
from gristmill.flows.prefect.serving import (
    OpenServerError,
    ServerFailedError,
    check_children,
    check_password,
    serve_deployments,
)
from tests.commands import GRISTMILL, finished
from tests.servers import (
    DEADLINE_SECONDS,
    call_prefect,
    free_port,
    free_ports,
    kept_password,
    prefect_home,
    wait_for,
)

pytestmark = pytest.mark.slow

PASSWORD = "tests:of serving"

MANIFEST = """\
name: tiny
sources:
  notes: {path: "notes/*.txt"}
prepare:
  - filter: {rules: [{gopher_quality: {min_words: 5}}]}
"""


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process of this test and its process group."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=20)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def call(api: str, path: str, body: Any = None) -> Any:
    return call_prefect(api, path, body, password=PASSWORD)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    notes = tmp_path / "notes"
    notes.mkdir()
    line = "The words of this note have to be with that and the rest. "
    for number in range(6):
        (notes / f"{number}.txt").write_text(line * (number + 1))
    (notes / "short.txt").write_text("Too short.")
    manifest = tmp_path / "tiny.yaml"
    manifest.write_text(MANIFEST)
    return manifest


def environment_with(home: str) -> dict[str, str]:
    """Return the environment of a Prefect process that keeps its files in a folder and
    sends no telemetry.
    """
    environment = {
        name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"
    }
    return {
        **environment,
        "PREFECT_HOME": home,
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    }


@pytest.fixture
def environment(tmp_path: Path, prefect_database: Path) -> dict[str, str]:
    return environment_with(prefect_home(tmp_path / "prefect", prefect_database))


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, prefect_database: Path
) -> Iterator[str]:
    """API address of a Prefect server on a free port of the loopback address."""
    environment = environment_with(
        prefect_home(tmp_path_factory.mktemp("server") / "prefect", prefect_database)
    )
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ],
        env={
            **environment,
            "PREFECT_UI_API_URL": "/api",
            "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: call(api, "/health"), "the server's answer")
        yield api
    finally:
        stop(process)


def flow_runs(api: str) -> list[dict[str, Any]]:
    return call(api, "/flow_runs/filter", {"sort": "START_TIME_DESC"})


def task_states(api: str, flow_run: str) -> dict[str, str]:
    runs = call(api, "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    return {run["name"]: run["state_name"] for run in runs}


def parents(
    runs: list[tuple[str, str, Mapping[str, Any]]],
) -> dict[str, dict[str, list[str]]]:
    """Return the parents that Prefect draws for each task, by kind of relation; `runs`
    are (id, name, task_inputs).
    """
    names = {uuid.UUID(run_id): name for run_id, name, _ in runs}
    return {
        name: {
            key: [names[uuid.UUID(task_input["id"])] for task_input in of_key]
            for key, of_key in inputs.items()
            if of_key
        }
        for _, name, inputs in runs
    }


@pytest.mark.slow
def test_deployments_run_with_parameters_from_the_api(
    server: str, project: Path, environment: dict[str, str]
) -> None:
    environment = {
        **environment,
        "PREFECT_API_URL": server,
        "PREFECT_API_AUTH_STRING": PASSWORD,
    }
    store = project.parent / "store"
    serving = subprocess.Popen(
        [*GRISTMILL, "serve"],
        env=environment,
        cwd=project.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deployments = wait_for(
            lambda: (
                found
                if len(found := call(server, "/deployments/filter", {})) == 4
                else None
            ),
            "registering the deployments",
        )
        run_deployment = next(
            deployment
            for deployment in deployments
            if deployment["name"] == "tiny"
            and "until" in deployment["parameter_openapi_schema"]["properties"]
        )
        created = call(
            server,
            f"/deployments/{run_deployment['id']}/create_flow_run",
            {
                "parameters": {
                    "manifest": str(project),
                    "store": str(store),
                    "until": "filter",
                    "overrides": ["prepare.filter.rules.gopher_quality.min_words=20"],
                }
            },
        )
        ended = wait_for(
            lambda: (
                (run := call(server, f"/flow_runs/{created['id']}"))["state_type"]
                in ("COMPLETED", "FAILED", "CRASHED")
                and run
            ),
            "the triggered run's end",
        )
        assert (ended["state_type"], ended["state"]["message"]) == (
            "COMPLETED",
            ended["state"]["message"],
        )
        wait_for(
            lambda: len(task_states(server, created["id"])) == 2, "both tasks' records"
        )
        assert task_states(server, created["id"]) == {
            "ingest": "Completed",
            "filter": "Completed",
        }
    finally:
        stop(serving)
    (output,) = (store / "filter").iterdir()
    counts = json.loads((output / "manifest.json").read_text())["summary"]["counts"]
    # Notes have one to six lines of 12 words: a minimum of 20 words drops the first and
    # the short one.
    assert (counts["read"], counts["kept"], counts["dropped"]) == (
        7,
        5,
        {"gopher_quality/min_words": 2},
    )


def test_a_run_from_the_command_line_shows_up_in_a_running_server(
    server: str, project: Path, environment: dict[str, str]
) -> None:
    command = [
        *GRISTMILL,
        "run",
        str(project),
        "--store",
        str(project.parent / "s"),
    ]
    runs = []
    for how in ("Completed", "Cached"):
        finished(
            command,
            env={
                **environment,
                "PREFECT_API_URL": server,
                "PREFECT_API_AUTH_STRING": PASSWORD,
            },
        )
        newest = flow_runs(server)[0]
        assert newest["state_type"] == "COMPLETED"
        assert task_states(server, newest["id"]) == {"ingest": how, "filter": how}
        runs.append(newest["id"])
        tasks = call(
            server, "/task_runs/filter", {"flow_runs": {"id": {"any_": [newest["id"]]}}}
        )
        assert parents(
            [(task["id"], task["name"], task["task_inputs"]) for task in tasks]
        ) == {
            "ingest": {},
            "filter": {"wait_for": ["ingest"]},
        }
    cards = call(
        server,
        "/artifacts/filter",
        {
            "artifacts": {
                "key": {"any_": ["filter-card"]},
                "flow_run_id": {"any_": runs},
            }
        },
    )
    assert r"dropped: gopher\_quality/min\_words | 1" in cards[0]["data"]


def test_run_without_server_starts_no_server_and_stores_no_credentials(
    project: Path, tmp_path: Path
) -> None:
    home = tmp_path / "prefect"
    secret = "sources.notes.licence=https://me:hunter2@example.org/licence"
    run = finished(
        [
            *GRISTMILL,
            "run",
            str(project),
            "--store",
            str(project.parent / "s"),
            "--set",
            secret,
        ],
        env=environment_with(str(home)),
    )
    assert run.stderr == ""
    # a server would have created its database
    assert not home.exists() or list(home.iterdir()) == []
    files = [path for path in (project.parent / "s").rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []


@pytest.mark.slow
def test_up_starts_shares_and_stops_a_server_with_the_deployments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a server; `up` also creates its database."""
    environment = environment_with(str(tmp_path / "prefect"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    port = free_ports()
    api = f"http://127.0.0.1:{port}/api"
    printed = tmp_path / "printed.txt"
    names = ["any-manifest", "stage-of-any-manifest"]

    def deployments() -> dict[str, bool]:
        """Return whether each deployment is paused, by name."""
        deployment_records = call_prefect(
            api, "/deployments/filter", {}, password=kept_password(tmp_path / "prefect")
        )
        return {
            deployment["name"]: deployment["paused"]
            for deployment in deployment_records
        }

    with printed.open("wb") as sink:
        up = subprocess.Popen(
            [*GRISTMILL, "up", "--port", str(port)],
            env=environment,
            stdout=sink,
            cwd=tmp_path,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(
            lambda: (
                (tmp_path / "prefect" / "gristmill-password").exists() and deployments()
            ),
            "serving",
        )
        again = subprocess.run(
            [*GRISTMILL, "up", "--port", str(port)],
            env=environment,
            capture_output=True,
            text=True,
        )
        error_text = " ".join(again.stderr.split())
        assert again.returncode == 2
        assert f"port {port} is in use" in error_text
        assert f"open http://127.0.0.1:{port}, or choose" in error_text
        below = finished(
            [*GRISTMILL, "up", "--port", str(port - 1)], code=2, env=environment
        )
        assert f"port {port} is in use" in " ".join(below.stderr.split())

        with (tmp_path / "serve.txt").open("wb") as sink:
            serve = subprocess.Popen(
                [*GRISTMILL, "serve"],
                env={**environment, "PREFECT_API_URL": api},
                stdout=sink,
                cwd=tmp_path,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_for(
            lambda: "Deployments" in (tmp_path / "serve.txt").read_text(),
            "another process that serves",
        )
        serve.send_signal(signal.SIGTERM)
        serve.wait(timeout=DEADLINE_SECONDS)
        assert deployments() == dict.fromkeys(names, False)

        up.send_signal(signal.SIGTERM)
        up.wait(timeout=DEADLINE_SECONDS)
        with socket.socket() as probe:
            wait_for(
                lambda: probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED,
                "the server's end",
            )
    finally:
        stop(up)
    for text in (printed.read_text(), (tmp_path / "serve.txt").read_text()):
        assert "never awaited" not in text
        assert "Traceback" not in text
    assert (tmp_path / "prefect" / "prefect.db").stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(tmp_path / "prefect" / "prefect.db") as database:
        assert dict(
            database.execute("select name, paused from deployment").fetchall()
        ) == dict.fromkeys(names, 1)


def test_child_of_up_exits_if_its_parent_is_already_dead() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait()
    child = subprocess.run(
        [
            sys.executable,
            "-m",
            "gristmill.flows.prefect.serving",
            "server",
            str(free_port()),
            str(parent.pid),
        ],
        timeout=DEADLINE_SECONDS,
    )
    assert child.returncode == -signal.SIGTERM


def test_exited_child_of_up_is_an_error_with_its_code() -> None:
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    child.wait()
    with pytest.raises(ServerFailedError, match=r"code 3"):
        check_children([child])


def test_serve_without_a_server_names_the_command_to_start_one(
    environment: dict[str, str],
) -> None:
    run = finished(
        [*GRISTMILL, "serve"],
        code=2,
        env={**environment, "PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"},
    )
    assert "gristmill up" in run.stderr
    assert "Traceback" not in run.stderr


def test_run_continues_if_the_server_password_is_unknown(
    server: str, project: Path, environment: dict[str, str]
) -> None:
    run = finished(
        [
            *GRISTMILL,
            "run",
            str(project),
            "--store",
            str(project.parent / "s"),
            "--until",
            "ingest",
        ],
        env={**environment, "PREFECT_API_URL": server},
    )
    assert "requires a password" in run.stdout
    serving = finished(
        [*GRISTMILL, "serve"], code=2, env={**environment, "PREFECT_API_URL": server}
    )
    assert "set PREFECT_API_AUTH_STRING=USER:PASSWORD to the server's" in " ".join(
        serving.stderr.split()
    )


def test_serve_rejects_a_server_without_password_unless_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"/api/health": b"true", "/api/admin/version": b'"3.8.8"'}

    class Open(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(self.path, b""))

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Open) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = f"http://127.0.0.1:{server.server_address[1]}/api"
        monkeypatch.setenv("PREFECT_API_URL", api)
        with pytest.raises(OpenServerError, match="requires no password: any web page"):
            serve_deployments(1, [])
        check_password(api, allow_open_server=True)
        server.shutdown()


def test_stored_password_is_created_once_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    with ThreadPoolExecutor(8) as pool:
        passwords = set(pool.map(lambda _: server_password(), range(8)))
    assert len(passwords) == 1
    password_file().chmod(0o644)
    assert {server_password()} == passwords
    assert password_file().stat().st_mode & 0o777 == 0o600
    assert [path.name for path in password_file().parent.iterdir()] == [
        password_file().name
    ]
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "me:mine")
    assert server_password() == "me:mine"


def test_manifests_are_searched_two_levels_deep_and_invalid_ones_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "b.yaml": MANIFEST,
        "mine/a.yml": MANIFEST,
        "mine/deeper/c.yaml": MANIFEST,
        ".hidden/d.yaml": MANIFEST,
        "ci.yaml": "jobs: {}",
        "wrong.yaml": MANIFEST + "stepz: 3\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    offered = [ManifestOnOffer(path) for path in find_manifests(tmp_path)]
    assert [(item.name, item.path, item.stages) for item in offered] == [
        ("b", tmp_path / "b.yaml", ["ingest", "filter"]),
        ("mine-a", tmp_path / "mine" / "a.yml", ["ingest", "filter"]),
    ]
    printed = capsys.readouterr().out
    assert printed.startswith("wrong.yaml gets no deployments of its own: ")
    assert "stepz" in printed
    assert [
        f"{item.flow_name}/{item.name}" for item in make_deployments(offered[:1])
    ] == [
        "gristmill/b",
        "gristmill-stage/stage-of-b",
        "gristmill/any-manifest",
        "gristmill-stage/stage-of-any-manifest",
    ]
