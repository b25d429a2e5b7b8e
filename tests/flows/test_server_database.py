"""Prefect's records in PostgreSQL: a database is used and kept, and its password stays
secret.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gristmill.flows.prefect.serving import DATABASE_VARIABLE
from tests.commands import GRISTMILL, finished
from tests.servers import call_prefect, free_ports, kept_password, wait_for

PASSWORD = "hunter2/@%"
USER = "gristmill"
MANIFEST = """\
name: tiny
sources: {notes: {path: "notes/*.txt"}}
"""


def postgres_program(name: str) -> str:
    """Return the path of a PostgreSQL program, which Debian keeps off PATH."""
    folders = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda path: int(path.parent.name),
        reverse=True,
    )
    program = shutil.which(name) or shutil.which(
        name, path=os.pathsep.join(map(str, folders))
    )
    if program is None:
        pytest.skip(f"PostgreSQL is not installed: there is no {name}")
    return program


@dataclass(frozen=True)
class Cluster:
    """A private PostgreSQL on the loopback address."""

    port: int

    @property
    def url(self) -> str:
        password = quote(PASSWORD, safe="")
        return f"postgresql+asyncpg://{USER}:{password}@127.0.0.1:{self.port}/postgres"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster; PostgreSQL refuses root, so as root it runs as `nobody` in a folder
    that this user can reach.
    """
    initdb, postgres = postgres_program("initdb"), postgres_program("postgres")
    folder = Path(tempfile.mkdtemp(prefix="gristmill-postgres-"))
    (folder / "password").write_text(PASSWORD)
    user: dict[str, Any] = {}
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        for path in (folder, folder / "password"):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
    port = free_ports()
    process = None
    try:
        subprocess.run(
            [
                initdb,
                "--pgdata",
                str(folder / "data"),
                "--username",
                USER,
                "--no-sync",
                "--locale=C",
                "--encoding=UTF8",
                "--auth=scram-sha-256",
                f"--pwfile={folder / 'password'}",
            ],
            check=True,
            capture_output=True,
            cwd=folder,
            **user,
        )
        process = subprocess.Popen(
            [
                postgres,
                "-D",
                str(folder / "data"),
                "-p",
                str(port),
                "-c",
                "listen_addresses=127.0.0.1",
                "-c",
                "unix_socket_directories=",
                "-c",
                "fsync=off",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            **user,
        )
        started = Cluster(port)
        wait_for(
            lambda: answers(started) or process.poll() is not None,
            "PostgreSQL's answer",
        )
        assert process.poll() is None, "PostgreSQL ended by itself"
        yield started
    finally:
        if process is not None:
            # a fast shutdown: clients are disconnected
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)
        shutil.rmtree(folder)


def ask(cluster: Cluster, statement: str) -> list[tuple[Any, ...]]:
    """Query the database through another driver than Prefect's."""
    import asyncpg

    async def fetch() -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(
            host="127.0.0.1",
            port=cluster.port,
            user=USER,
            password=PASSWORD,
            database="postgres",
        )
        try:
            return [tuple(row) for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    # In a thread, since this one may have the event loop of a browser that other tests
    # drive.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, fetch()).result()


def answers(cluster: Cluster) -> bool:
    import asyncpg

    try:
        return ask(cluster, "select 1") == [(1,)]
    except (OSError, asyncpg.PostgresError):
        return False


@pytest.mark.slow
def test_up_stores_runs_in_postgresql_and_hides_the_password(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("A note of some words.")
    (tmp_path / "tiny.yaml").write_text(MANIFEST)
    port = free_ports()
    api = f"http://127.0.0.1:{port}/api"
    environment = {
        name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"
    }
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect")}
    output = tmp_path / "up.txt"
    with output.open("wb") as sink:
        up = subprocess.Popen(
            [
                *GRISTMILL,
                "up",
                "--port",
                str(port),
            ],
            env={**environment, DATABASE_VARIABLE: cluster.url},
            cwd=tmp_path,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(
            lambda: up.poll() is not None or "Deployments" in output.read_text(),
            "serving",
        )
        assert up.poll() is None, output.read_text()
        children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in children]
        assert [cluster.url in text for text in environments] == [True, False], (
            "the server alone knows the password"
        )
        run = finished(
            [*GRISTMILL, "run", "tiny.yaml"],
            cwd=tmp_path,
            env={**environment, "PREFECT_API_URL": api},
        )
        settings = json.dumps(
            call_prefect(
                api, "/admin/settings", password=kept_password(tmp_path / "prefect")
            )
        )
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(timeout=60)
    # The database holds the server's records after the server has ended.
    assert ask(cluster, "select name, state_type::text from flow_run") == [
        ("tiny", "COMPLETED")
    ]
    assert ask(cluster, "select name, state_name from task_run") == [
        ("ingest", "Completed")
    ]
    assert not (tmp_path / "prefect" / "prefect.db").exists()
    texts = [output.read_text(), run.stdout, run.stderr, settings]
    texts += [
        path.read_text(errors="replace")
        for folder in ("prefect", "gristmill-store")
        for path in (tmp_path / folder).rglob("*")
        if path.is_file()
    ]
    assert not [
        text for text in texts if PASSWORD in text or quote(PASSWORD, safe="") in text
    ]
