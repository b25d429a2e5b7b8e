"""Hosts that share only a network and an S3-compatible store: workers without this
package, with separate homes.

Each is a network namespace whose processes do not see the checkout, the driver's files
or the homes of other hosts: empty folders are mounted over all of these. Their Python
finds the installed libraries, but not gristmill.
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

from benchmarks.engines.clusters import EXECUTOR_MEMORY, find_engine
from benchmarks.store_servers import AWS_CREDENTIALS
from gristmill.core.files import cache_folder
from tests.hosts import Host, hosts
from tests.servers import wait_for

CHECKOUT = Path(__file__).resolve().parents[1]
LIBRARIES = Path(np.__file__).parents[1]
STORE_PORT, SCHEDULER_PORT, MASTER_PORT = 9000, 8786, 7077
"""Unused ports in a new network."""
BUCKET = "bucket"


@dataclass
class Machines:
    """The hosts and the processes on them.

    Attributes:
        driver: host with the checkout, the store's server and a cluster's scheduler or
            master.
        strangers: the other hosts.
        folder: the driver's files; hidden from the strangers.
        hidden: another folder that is hidden from the strangers.
        lent: folders mounted in each stranger's home, by their names there.
        log: file with the output of all programs.
        processes: all started processes.
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
        """Environment variables with the store's address and credentials."""
        return {
            **AWS_CREDENTIALS,
            "AWS_ENDPOINT_URL": f"http://{self.driver.address}:{STORE_PORT}",
        }

    def lead(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program on the driver's host with this process's environment."""
        return self._started(
            self.driver, command, {**os.environ, **self.store, **environment}, ""
        )

    def run(self, *command: str, **environment: str) -> str:
        """Run a program on the driver's host to its end and return its output.

        Raises:
            AssertionError: the program failed.
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

    def start(
        self, host: Host, *command: str, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a program on a stranger's host, whose `python` finds the libraries but
        not gristmill.

        Args:
            host: one of `strangers`.
            command: the command.
            environment: variables in addition to its home and the store's address.
        """
        home = self.home(host)
        variables = {
            "PATH": f"{home / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(home / "tmp"),
            **self.store,
            **environment,
        }
        return self._started(host, command, variables, self._seen_by(host))

    def home(self, host: Host) -> Path:
        """Return a stranger's home folder, created at the first call."""
        home = self.folder.parent / host.name
        if not home.exists():
            for name in ("tmp", "venv/bin"):
                (home / name).mkdir(parents=True)
            base = Path(sys.base_prefix) / "bin"
            (home / "venv" / "bin" / "python").symlink_to(
                base / f"python{sys.version_info[0]}"
            )
            (home / "venv" / "bin" / "python3").symlink_to("python")
            (home / "venv" / "pyvenv.cfg").write_text(
                f"home = {base}\ninclude-system-site-packages = false\n"
            )
            packages = Path(
                sysconfig.get_path("purelib", vars={"base": str(home / "venv")})
            )
            packages.mkdir(parents=True)
            # Python reads no .pth file in a folder that a .pth file names, so the
            # checkout's own .pth has no effect.
            (packages / "libraries.pth").write_text(f"{home / 'libraries'}\n")
        return home

    def said(self) -> str:
        """Return the last output of all programs."""
        return Path(self.log.name).read_text(errors="replace")[-6000:]

    def _seen_by(self, host: Host) -> str:
        others = [
            self.home(other) for other in self.strangers if other.name != host.name
        ]
        hidden = [CHECKOUT, self.folder, self.hidden, cache_folder(), *others]
        for name in self.lent:
            (self.home(host) / name).mkdir(exist_ok=True)
        return "".join(
            [
                *(
                    f"mount --bind {folder} {self.home(host) / name} && "
                    for name, folder in self.lent.items()
                ),
                *(
                    f"mount -t tmpfs none {folder} && "
                    for folder in hidden
                    if folder.exists()
                ),
            ]
        )

    def _started(
        self,
        host: Host,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        first: str,
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
    """Run a driver's host with a store's server, and two strangers, until the context
    exits.

    Args:
        folder: root of all their files.
        hidden: a folder of the driver outside of `folder`.
    """
    (folder / "driver").mkdir()
    with (
        hosts("driver", "stranger-a", "stranger-b") as (driver, *strangers),
        open(folder / "log", "wb") as log,
    ):
        cluster = Machines(driver, strangers, folder / "driver", hidden, log)
        try:
            cluster.lead(
                sys.executable,
                "-m",
                "moto.server",
                "-H",
                driver.address,
                "-p",
                str(STORE_PORT),
            )
            wait_for(lambda: answers(cluster, STORE_PORT), "the store's answer")
            yield cluster
        finally:
            for process in reversed(cluster.processes):
                end(process)


def answers(cluster: Machines, port: int) -> bool:
    """Return whether a process listens on a port of the driver's host."""
    command = [
        "ip",
        "netns",
        "exec",
        cluster.driver.namespace,
        sys.executable,
        "-S",
        "-c",
        f"import socket; socket.create_connection(({cluster.driver.address!r}, "
        f"{port}), 1)",
    ]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def end(process: subprocess.Popen[str]) -> None:
    """End a program and all its child processes."""
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def start_dask(cluster: Machines) -> str:
    """Start a scheduler and a worker on each stranger's host; returns the manifest's
    `engine` section.
    """
    first = cluster.strangers[0]
    address = f"tcp://{first.address}:{SCHEDULER_PORT}"
    cluster.start(
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
    for host in cluster.strangers:
        cluster.start(
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
            str(cluster.home(host) / "tmp"),
        )
    return json.dumps({"runner": "dask", "address": address, "workers": 2})


def start_spark(cluster: Machines) -> str:
    """Start a master on the driver's host and a worker on each stranger's, which has
    Spark in its home.
    """
    cluster.lent["spark"] = find_engine("spark-*")
    os.environ["SPARK_HOME"] = str(cluster.lent["spark"])
    master = f"spark://{cluster.driver.address}:{MASTER_PORT}"
    cluster.lead(
        str(cluster.lent["spark"] / "bin" / "spark-class"),
        "org.apache.spark.deploy.master.Master",
        "--host",
        cluster.driver.address,
        "--port",
        str(MASTER_PORT),
        "--webui-port",
        "0",
        SPARK_DAEMON_MEMORY="256m",
    )
    wait_for(lambda: answers(cluster, MASTER_PORT), "the master's answer")
    for host in cluster.strangers:
        home = cluster.home(host)
        cluster.start(
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
                "spark.driver.host": cluster.driver.address,
                "spark.driver.bindAddress": cluster.driver.address,
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
