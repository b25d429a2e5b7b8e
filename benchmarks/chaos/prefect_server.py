"""Prefect server that can be killed and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill.flows.prefect.choose_prefect import DEFAULT_SETTINGS, answers

START_SECONDS = 900.0
"""Most time of a start: the first one makes the database, slowly on a busy machine."""
POLL_SECONDS = 0.2


class PrefectServer:
    """Server with its database in a folder.

    Attributes:
        api: its address, the same after every start.
        home: the folder.
    """

    def __init__(self, home: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._port = listening.getsockname()[1]
        self.api, self.home = f"http://127.0.0.1:{self._port}/api", home
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait for an answer.

        Raises:
            subprocess.SubprocessError: it ends instead, or takes too long.
        """
        command = [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **DEFAULT_SETTINGS, "PREFECT_HOME": str(self.home)},
        )
        deadline = time.monotonic() + START_SECONDS
        while not answers(self.api):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise subprocess.SubprocessError(
                    f"Prefect's server did not answer at {self.api}"
                )
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kill the server and its descendants."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def states(self) -> list[str]:
        """Return the names of the states of all flow runs."""
        request = urllib.request.Request(
            f"{self.api}/flow_runs/filter",
            data=b"{}",
            method="POST",
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return [run["state_name"] for run in json.load(reply)]


@contextmanager
def prefect_server(home: Path) -> Iterator[PrefectServer]:
    """Run a server, and kill it at the end."""
    server = PrefectServer(home)
    try:
        server.start()
        yield server
    finally:
        server.kill()
