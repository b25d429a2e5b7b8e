"""Commands of gristmill that start at once: each is forked from a process that has
imported everything.

All processes of a run start this way (benchmarks/chaos/warm.py). They behave as
separate programs do, but save the seconds of importing Beam, torch or pandas.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socketserver
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from benchmarks.chaos import warm
from gristmill.flows.running.fork_server import Forked
from gristmill.flows.running.stage_server import StageServer

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    line.sendall(json.dumps([os.getpid(), dict(os.environ), sys.argv[1:]]).encode() + b"\\n")
    sys.exit(int(line.makefile().readline()))
"""
"""The shell command `gristmill`: requests a fork with its folder, environment and
streams, and waits for it. The fork gets SIGTERM if the client is killed.
"""


class _ForkRequest(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        caller, environment, arguments = json.loads(self.rfile.readline())
        # Messages name the command as found on PATH, so PATH is that of a shell without
        # this folder.
        environment["PATH"] = environment.get("PATH", "").removeprefix(
            f"{commands_folder()}{os.pathsep}"
        )
        with open(os.devnull, "w") as nothing:
            process = warm.start(arguments, environment, nothing.fileno(), caller)
            pid, has_ended = process.begun(), threading.Event()

            def end_with_client() -> None:
                self.connection.recv(1)
                if not has_ended.is_set():
                    os.kill(pid, signal.SIGTERM)

            threading.Thread(target=end_with_client, daemon=True).start()
            code = process.wait()
        has_ended.set()
        with suppress(BrokenPipeError):  # the client was killed
            self.wfile.write(b"%d\n" % (code if code >= 0 else 128 - code))


@cache
def commands_folder() -> Path:
    """Create a folder for the front of PATH whose `gristmill` starts at once; it works
    until this process ends.
    """
    folder = tempfile.TemporaryDirectory(prefix="gristmill-warm-")
    atexit.register(folder.cleanup)
    client, address = Path(folder.name, "gristmill"), str(Path(folder.name, "socket"))
    server = socketserver.ThreadingUnixStreamServer(address, _ForkRequest)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    return client.parent


class WarmStages:
    """Stand-in for the process that stages are forked from
    (`flows/running/stage_server.py`).
    """

    is_running = True
    driver = None
    forks_trainings = False
    driver_environment = StageServer.driver_environment

    def import_soon(self, modules: Sequence[str]) -> None:
        """Do nothing: all modules are imported."""

    def start(
        self,
        environment: Mapping[str, str],
        modules: Sequence[str],
        output: int,
        command: Sequence[str] = (),
    ) -> Forked:
        """Fork the process of a stage, including training stages."""
        return warm.start_module(
            "gristmill.flows.running.execute", command, environment, output
        )

    def close(self) -> None:
        """Do nothing: the process is shared."""


def gristmill_command(
    arguments: Sequence[str], folder: Path | None = None, columns: int = 80
) -> subprocess.CompletedProcess[str]:
    """Run a gristmill command to its end in a folder (default: the current one), with
    captured stdout and stderr.
    """
    return subprocess.run(
        [commands_folder() / "gristmill", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": str(columns)},
    )
