"""A Dask cluster for tests, as processes on the loopback address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.servers import wait_for


class Cluster:
    """A scheduler and workers, each a process of its own, on the loopback address.

    Args:
        folder: for what they write.
        allowed_failures: how many workers may die of a task before the scheduler gives
            it up.
    """

    def __init__(self, folder: Path, allowed_failures: int = 3) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": str(allowed_failures),
        }
        self._file = folder / "scheduler.json"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.scheduler = self._start(
            "dask_scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
            str(self._file),
        )
        wait_for(
            lambda: self._file.exists() and self._file.read_text().endswith("}"),
            "the start of the scheduler",
        )
        self.address: str = json.loads(self._file.read_text())["address"]

    def add_worker(self) -> None:
        self.workers.append(
            self._start(
                "dask_worker",
                self.address,
                "--host",
                "127.0.0.1",
                "--nthreads",
                "1",
                "--no-nanny",
                "--no-dashboard",
                "--local-directory",
                str(self._folder),
            )
        )

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self._folder / "cluster.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{module}", *arguments],
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=Path(__file__).parents[2],
            )
