"""Prefect's records in PostgreSQL: a real database is used and kept, a wrong one is
rejected at once, passwords stay secret.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gristmill.flows.orchestration.server_settings import (
    CONNECTION_VARIABLE,
    DATABASE_VARIABLE,
    DatabaseError,
    check_database,
    database_environment,
)
from tests.servers import call_prefect, free_port, free_ports, kept_password, wait_for

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

    def url(
        self, user: str = USER, password: str = PASSWORD, name: str = "postgres"
    ) -> str:
        return f"postgresql+asyncpg://{user}:{quote(password, safe='')}@127.0.0.1:{self.port}/{name}"


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


def answers(cluster: Cluster) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", cluster.port)) == 0 and "PostgreSQL" in (
            check(cluster.url()) or ""
        )


def check(url: str) -> str | None:
    try:
        return check_database(url)
    except DatabaseError as error:
        return None if "starting up" in str(error) else str(error)


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

    return in_a_loop_of_its_own(fetch())


def in_a_loop_of_its_own(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread, since this thread may have the event loop of a
    browser that other tests drive.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


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
                sys.executable,
                "-m",
                "gristmill.flows.cli.main",
                "up",
                "--port",
                str(port),
                "--database",
                cluster.url(),
            ],
            env=environment,
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
        run = subprocess.run(
            [sys.executable, "-m", "gristmill.flows.cli.main", "run", "tiny.yaml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**environment, "PREFECT_API_URL": api},
        )
        assert run.returncode == 0, run.stdout + run.stderr
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
    assert f"PostgreSQL at 127.0.0.1:{cluster.port}/postgres" in output.read_text()
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


def test_unusable_database_is_rejected_before_the_server_starts(
    cluster: Cluster,
) -> None:
    ask(cluster, "create role guest login password 'guest'")
    for url, reason in (
        (
            cluster.url(password="wrong"),
            'password authentication failed for user "gristmill"',
        ),
        (cluster.url(name="absent"), 'database "absent" does not exist'),
        (
            cluster.url(user="guest", password="guest"),
            "does not allow guest to create tables",
        ),
        (Cluster(free_port()).url(), "onnect"),
    ):
        with pytest.raises(DatabaseError, match=reason) as error:
            check_database(url)
        assert "PostgreSQL at 127.0.0.1:" in str(error.value)
        assert not {"hunter2", "wrong", ":guest"} & set(
            str(error.value).replace("@", " ").split()
        )


def test_database_check_works_inside_an_event_loop() -> None:
    async def inside() -> None:
        check_database(Cluster(free_port()).url())

    with pytest.raises(DatabaseError, match="onnect"):
        in_a_loop_of_its_own(inside())


@pytest.mark.slow
def test_up_exits_with_the_database_error(cluster: Cluster) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "gristmill.flows.cli.main",
            "up",
            "--port",
            str(free_port()),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, DATABASE_VARIABLE: cluster.url(password="wrong")},
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.splitlines() == [
        f"PostgreSQL at 127.0.0.1:{cluster.port}/postgres cannot be used as gristmill: "
        'password authentication failed for user "gristmill"; correct --database or '
        "GRISTMILL_DATABASE"
    ]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://me:hunter2@host/db", "beginning with mysql:// are not supported"),
        ("me:hunter2@host/db", "this is not a URL"),
        ("postgresql://me:hunter2@x@host/db", "%40"),
        ("postgresql://me:hunter2/x@host/db", "%2F"),
        ("postgresql://me:hunter2?x@host/db", "%3F"),
        ("postgresql://me:100%@host/db", "%25"),
        (
            "postgresql://me:hunter2/db",
            "is not written as postgresql://USER:PASSWORD@HOST:PORT/NAME",
        ),
        (
            "postgresql://me:hunter2@host",
            "is not written as postgresql://USER:PASSWORD@HOST:PORT/NAME",
        ),
        ("postgresql://me:hunter2@host:port/db", "is not written as"),
    ],
)
def test_malformed_database_url_is_rejected_without_echoing_it(
    url: str, message: str
) -> None:
    with pytest.raises(DatabaseError) as error:
        database_environment(url)
    assert message in str(error.value)
    assert "hunter2" not in str(error.value)
    assert "100" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "server_url"),
    [
        ("postgres://me@host/db", "postgresql+asyncpg://me@host/db"),
        (
            "postgresql://me:a%40b@[::1]:5432/db",
            "postgresql+asyncpg://me:a%40b@[::1]:5432/db",
        ),
        (
            "postgresql+asyncpg://me:a@/db?host=/run/postgresql",
            "postgresql+asyncpg://me:a@/db?host=/run/postgresql",
        ),
        ("sqlite+aiosqlite:////tmp/a.db", "sqlite+aiosqlite:////tmp/a.db"),
    ],
)
def test_the_server_gets_the_address_with_its_driver(url: str, server_url: str) -> None:
    assert database_environment(url) == {CONNECTION_VARIABLE: server_url}
    assert database_environment(None) == {}
