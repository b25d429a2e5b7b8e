"""What tests that start servers share: a free port, waiting for an answer, and an empty database for Prefect."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 200.0


def free_port() -> int:
    """A port of the loopback address that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports() -> int:
    """The first of two such ports in a row, as `gristmill up` wants them."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def wait_for(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """The first true value that a condition gives; a connection that is refused is none."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = condition()
        except OSError:
            found = None
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.1)


def kept_password(home: str | Path) -> str:
    """The password that `gristmill up` has made in a folder of Prefect."""
    return (Path(home) / "gristmill-password").read_text().strip()


def call_prefect(
    api: str, path: str, body: Any = None, method: str | None = None, password: str | None = None, **headers: str
) -> Any:
    """Ask a Prefect server's API; a body makes it a POST."""
    if password is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"
    request = urllib.request.Request(
        f"{api}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **headers},
        method=method or ("GET" if body is None else "POST"),
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read() or b"null")


def make_prefect_database(shared: Path) -> Path:
    """An empty database of Prefect below a folder that all workers share, unless it is there.

    A server makes one where it finds none: by some hundred migrations, which take nine seconds each time.
    """
    database = shared / "prefect" / "prefect.db"
    with (shared / "prefect.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            making = shared / "prefect-made"
            making.mkdir()
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
            subprocess.run(
                [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"],
                check=True,
                env={**environment, "PREFECT_HOME": str(making)},
                capture_output=True,
            )
            making.rename(database.parent)
    return database


def prefect_home(folder: Path, database: Path) -> str:
    """A folder for PREFECT_HOME, with a copy of an empty database."""
    folder.mkdir(parents=True)
    shutil.copy(database, folder / database.name)
    return str(folder)
