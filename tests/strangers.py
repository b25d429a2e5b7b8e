"""Hosts that share nothing but a network and an S3-compatible store: workers without this package, homes of their own.

Each is a network namespace and, to its processes, a file system without the checkout, the files of the driver, and the
homes of the others: all of these are hidden under empty folders. Their Python finds the installed libraries, and no
gristmill.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from benchmarks.chaos.network import CREDENTIALS
from benchmarks.engines.clusters import EXECUTOR_MEMORY
from gristmill.core.files import cache_folder
from gristmill.dataprep.jobs import engine_downloads
from tests.hosts import Host, hosts
from tests.servers import wait_for

CHECKOUT = Path(__file__).resolve().parents[1]
LIBRARIES = Path(np.__file__).parents[1]
STORE_PORT, SCHEDULER_PORT, MASTER_PORT = 9000, 8786, 7077
"""Free in a network that is new."""
BUCKET = "bucket"


@dataclass
class Machines:
    """The hosts, and what runs there.

    Attributes:
        driver: has the checkout, the store's server, and whatever leads a cluster.
        strangers: the others.
        folder: of the driver's files; none of the others sees it,
        hidden: nor this one.
        lent: folders that each stranger has in its home, by their names there.
        log: takes what their programs print.
        processes: those that were started.
    """

    driver: Host
    strangers: list[Host]
    folder: Path
    hidden: Path
    log: IO[bytes]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    lent: dict[str, Path] = field(default_factory=lambda: {"libraries": LIBRARIES})

    @property
    def store(self) -> Mapping[str, str]:
        """What an environment has of the store's server."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{self.driver.address}:{STORE_PORT}"}

    def lead(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program on the driver's host, which has all that this process has."""
        return self._started(self.driver, command, {**os.environ, **self.store, **environment}, "")

    def run(self, *command: str, **environment: str) -> str:
        """Run a program on the driver's host to its end; what it printed.

        Raises:
            AssertionError: it failed.
        """
        process = self.driver.start(
            command,
            {**os.environ, **self.store, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
        )
        self.processes.append(process)
        text, _ = process.communicate()
        assert process.returncode == 0, f"{text}\n{self.said()}"
        return text

    def start(self, host: Host, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program on a stranger's host: `python` is one that finds the libraries, and no gristmill.

        Args:
            host: one of `strangers`.
            command: what runs.
            environment: what it has beside its home and the store's address.
        """
        home = self.home(host)
        told = {
            "PATH": f"{home / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(home / "tmp"),
            **self.store,
            **environment,
        }
        return self._started(host, command, told, self._seen_by(host))

    def home(self, host: Host) -> Path:
        """The home of a stranger, made when first asked for."""
        home = self.folder.parent / host.name
        if not home.exists():
            for name in ("tmp", "venv/bin"):
                (home / name).mkdir(parents=True)
            base = Path(sys.base_prefix) / "bin"
            (home / "venv" / "bin" / "python").symlink_to(base / f"python{sys.version_info[0]}")
            (home / "venv" / "bin" / "python3").symlink_to("python")
            (home / "venv" / "pyvenv.cfg").write_text(f"home = {base}\ninclude-system-site-packages = false\n")
            packages = Path(sysconfig.get_path("purelib", vars={"base": str(home / "venv")}))
            packages.mkdir(parents=True)
            # Of a folder that a .pth file names no .pth file is read: not that of the checkout's installation either.
            (packages / "libraries.pth").write_text(f"{home / 'libraries'}\n")
        return home

    def said(self) -> str:
        """What all programs printed."""
        return Path(self.log.name).read_text(errors="replace")[-6000:]

    def _seen_by(self, host: Host) -> str:
        others = [self.home(other) for other in self.strangers if other.name != host.name]
        hidden = [CHECKOUT, self.folder, self.hidden, cache_folder(), *others]
        for name in self.lent:
            (self.home(host) / name).mkdir(exist_ok=True)
        return "".join(
            [
                *(f"mount --bind {folder} {self.home(host) / name} && " for name, folder in self.lent.items()),
                *(f"mount -t tmpfs none {folder} && " for folder in hidden if folder.exists()),
            ]
        )

    def _started(
        self, host: Host, command: tuple[str, ...], environment: Mapping[str, str], first: str
    ) -> subprocess.Popen[str]:
        process = host.start(
            command,
            environment,
            first,
            stdout=self.log,
            stderr=self.log,
            stdin=subprocess.DEVNULL,
            cwd="/" if first else self.folder,
        )
        self.processes.append(process)
        return process


@contextmanager
def machines(folder: Path, hidden: Path) -> Iterator[Machines]:
    """A driver's host with the server of a store, and two strangers; gone with the `with`.

    Args:
        folder: for all their files.
        hidden: a folder of the driver's outside of it.
    """
    (folder / "driver").mkdir()
    with hosts("driver", "stranger-a", "stranger-b") as (driver, *others), open(folder / "log", "wb") as log:
        made = Machines(driver, others, folder / "driver", hidden, log)
        try:
            made.lead(sys.executable, "-m", "moto.server", "-H", driver.address, "-p", str(STORE_PORT))
            wait_for(lambda: answers(made, STORE_PORT), "the store's answer")
            yield made
        finally:
            for process in reversed(made.processes):
                end(process)


def answers(made: Machines, port: int) -> bool:
    """Whether somebody listens on a port of the driver's host."""
    asked = [
        "ip",
        "netns",
        "exec",
        made.driver.namespace,
        sys.executable,
        "-S",
        "-c",
        f"import socket; socket.create_connection(({made.driver.address!r}, {port}), 1)",
    ]
    return subprocess.run(asked, check=False, capture_output=True).returncode == 0


def end(process: subprocess.Popen[str]) -> None:
    """End a program and all that it started."""
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def start_dask(made: Machines) -> str:
    """A scheduler, and a worker on each stranger's host; what `engine` in the manifest says of it."""
    first = made.strangers[0]
    address = f"tcp://{first.address}:{SCHEDULER_PORT}"
    made.start(
        first,
        "python",
        "-m",
        "distributed.cli.dask_scheduler",
        "--host",
        first.address,
        "--port",
        str(SCHEDULER_PORT),
        "--no-dashboard",
    )
    for host in made.strangers:
        made.start(
            host,
            "python",
            "-m",
            "distributed.cli.dask_worker",
            address,
            "--host",
            host.address,
            "--nthreads",
            "1",
            "--no-nanny",
            "--no-dashboard",
            "--local-directory",
            str(made.home(host) / "tmp"),
        )
    return json.dumps({"runner": "dask", "address": address, "workers": 2})


def start_spark(made: Machines) -> str:
    """A master on the driver's host, and a worker on each stranger's, which has Spark in its home."""
    made.lent["spark"] = engine_downloads.find(engine_downloads.spark()).parents[1]
    master = f"spark://{made.driver.address}:{MASTER_PORT}"
    made.lead(
        str(made.lent["spark"] / "bin" / "spark-class"),
        "org.apache.spark.deploy.master.Master",
        "--host",
        made.driver.address,
        "--port",
        str(MASTER_PORT),
        "--webui-port",
        "0",
        SPARK_DAEMON_MEMORY="256m",
    )
    wait_for(lambda: answers(made, MASTER_PORT), "the master's answer")
    for host in made.strangers:
        home = made.home(host)
        made.start(
            host,
            str(home / "spark" / "bin" / "spark-class"),
            "org.apache.spark.deploy.worker.Worker",
            "--host",
            host.address,
            "--webui-port",
            "0",
            "--cores",
            "1",
            "--memory",
            "512m",
            "--work-dir",
            str(home / "tmp" / "work"),
            master,
            SPARK_HOME=str(home / "spark"),
            SPARK_DAEMON_MEMORY="256m",
        )
    return json.dumps(
        {
            "runner": "spark",
            "address": master,
            "options": {
                "spark.driver.host": made.driver.address,
                "spark.driver.bindAddress": made.driver.address,
                "spark.driver.memory": EXECUTOR_MEMORY,
                "spark.executor.memory": EXECUTOR_MEMORY,
                "spark.executor.cores": "1",
                "spark.pyspark.python": "python3",
            },
        }
    )


CLUSTERS: Mapping[str, Callable[[Machines], str]] = {
    "dask": start_dask,
    "spark": start_spark,
}
