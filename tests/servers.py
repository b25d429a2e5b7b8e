"""What tests that start servers share: a free port, waiting for an answer, and an empty database for Prefect."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 200.0


def free_port() -> int:
    """A port of the loopback address that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
            subprocess.run([sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"], check=True,
                           env={**environment, "PREFECT_HOME": str(making)}, capture_output=True)
            making.rename(database.parent)
    return database


def prefect_home(folder: Path, database: Path) -> str:
    """A folder for PREFECT_HOME, with a copy of an empty database."""
    folder.mkdir(parents=True)
    shutil.copy(database, folder / database.name)
    return str(folder)
