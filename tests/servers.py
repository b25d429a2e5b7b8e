"""Helpers of tests that start servers: free ports, waiting for a condition, and an
empty Prefect database.
"""

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
    """Return an unused port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports() -> int:
    """Return the first of two consecutive unused ports, which `gristmill up` needs."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def wait_for(
    condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS
) -> Any:
    """Return the first true value of a condition; a refused connection counts as
    false.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = condition()
        except OSError:
            value = None
        if value:
            return value
        assert time.monotonic() < deadline, (
            f"{what} did not happen within {seconds:.0f} s"
        )
        time.sleep(0.1)


def kept_password(home: str | Path) -> str:
    """Return the password that `gristmill up` created in a Prefect folder."""
    return (Path(home) / "gristmill-password").read_text().strip()


def call_prefect(
    api: str,
    path: str,
    body: Any = None,
    method: str | None = None,
    password: str | None = None,
    **headers: str,
) -> Any:
    """Call a Prefect server's API; a request with a body is a POST."""
    if password is not None:
        headers["Authorization"] = (
            f"Basic {base64.b64encode(password.encode()).decode()}"
        )
    request = urllib.request.Request(
        f"{api}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **headers},
        method=method or ("GET" if body is None else "POST"),
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read() or b"null")


def make_prefect_database(shared: Path) -> Path:
    """Create an empty Prefect database in a folder that all test workers share, unless
    it exists.

    A server without a database runs about a hundred migrations, which take nine seconds
    each time.
    """
    database = shared / "prefect" / "prefect.db"
    with (shared / "prefect.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            temporary = shared / "prefect-made"
            temporary.mkdir()
            environment = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith("PREFECT_")
            }
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "prefect",
                    "server",
                    "database",
                    "upgrade",
                    "--yes",
                ],
                check=True,
                env={**environment, "PREFECT_HOME": str(temporary)},
                capture_output=True,
            )
            temporary.rename(database.parent)
    return database


def prefect_home(folder: Path, database: Path) -> str:
    """Create a folder for PREFECT_HOME with a copy of an empty database."""
    folder.mkdir(parents=True)
    shutil.copy(database, folder / database.name)
    return str(folder)
