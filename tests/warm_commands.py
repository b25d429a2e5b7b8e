"""Commands of gristmill that begin at once: each is a process forked from one that has imported everything.

All processes of a run begin so (benchmarks/chaos/warm.py): what they do, print and leave behind is what they would as
programs of their own, without the seconds in which each imports Beam, torch or matplotlib.
"""

from __future__ import annotations

import atexit
import json
import os
import socketserver
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.chaos import warm
from gristmill.flows.running.fork_server import Forked

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    line.sendall(json.dumps([os.getpid(), dict(os.environ), sys.argv[1:]]).encode() + b"\\n")
    sys.exit(int(line.makefile().readline()))
"""
"""The command `gristmill` of a shell: it asks for a fork that has its folder, environment and streams, and waits."""


class _Asked(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        caller, environment, arguments = json.loads(self.rfile.readline())
        # As in a shell without this: messages name the command as it would be found there.
        environment["PATH"] = environment.get("PATH", "").removeprefix(f"{commands_folder()}{os.pathsep}")
        with open(os.devnull, "w") as nothing:
            code = warm.start(arguments, environment, nothing.fileno(), caller).wait()
        self.wfile.write(b"%d\n" % (code if code >= 0 else 128 - code))


@cache
def commands_folder() -> Path:
    """A folder for the front of PATH, whose `gristmill` begins at once; it works until this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="gristmill-warm-")
    atexit.register(folder.cleanup)
    client, address = Path(folder.name, "gristmill"), str(Path(folder.name, "socket"))
    server = socketserver.ThreadingUnixStreamServer(address, _Asked)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    return client.parent


class WarmStages:
    """In place of the process that a run's stages are forked from (`flows/running/stage_server.py`)."""

    is_running = True

    def import_soon(self, modules: Sequence[str]) -> None:
        """All is imported."""

    def start(
        self, environment: Mapping[str, str], modules: Sequence[str], output: int, command: Sequence[str] = ()
    ) -> Forked:
        """Fork the process of a stage, a training's too."""
        return warm.start_module("gristmill.flows.running.execute", command, environment, output)

    def close(self) -> None:
        """It is everybody's."""


def gristmill_command(
    arguments: Sequence[str], folder: Path | None = None, columns: int = 80
) -> subprocess.CompletedProcess[str]:
    """Run a command of gristmill to its end, in a folder or the current one; both outputs are kept, each by itself."""
    return subprocess.run(
        [commands_folder() / "gristmill", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": str(columns)},
    )
