"""Job servers: a job gets one that answers and is not about to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gristmill.dataprep.runners import servers
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.dataprep.runners.servers import VARIABLE, job_server, start_server
from tests.servers import wait_for

SERVER = """
import signal, socket, sys
from concurrent.futures import ThreadPoolExecutor
import grpc

port, closed = int(sys.argv[1]), sys.argv[2]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
server = grpc.server(ThreadPoolExecutor(1))
server.add_insecure_port(f"127.0.0.1:{port}")
server.start()
signal.sigwait({signal.SIGUSR1})
server.stop(None).wait()
with socket.create_server(("127.0.0.1", port)) as ending:
    open(closed, "w").close()
    ending.accept()
"""
"""Server that closes its connections on SIGUSR1 and accepts one more before it ends, as
the kernel may do.
"""


@pytest.fixture
def name() -> Iterator[str]:
    yield "toy"
    servers._end("toy")


@pytest.mark.slow
def test_job_server_that_is_ending_is_replaced(name: str, tmp_path: Path) -> None:
    def command(port: int, folder: Path) -> Sequence[str]:
        return [sys.executable, "-c", SERVER, str(port), str(tmp_path / "closed")]

    first = job_server(name, command)
    process = servers._running[name].process
    assert job_server(name, command) == first
    process.send_signal(signal.SIGUSR1)
    wait_for((tmp_path / "closed").exists, "the end of its connections")
    assert process.poll() is None
    job_server(name, command)
    assert process.poll() == 0
    assert servers._running[name].process.poll() is None
    assert servers._running[name].answers(0.0) is False  # no time to answer
    assert servers._running[name].answers(60.0)


@pytest.mark.slow
def test_stages_share_the_job_server_of_a_run_until_its_death(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(port: int, folder: Path) -> Sequence[str]:
        return [sys.executable, "-c", SERVER, str(port), str(tmp_path / "closed")]

    shared = start_server(name, command)
    monkeypatch.setattr(servers, "SHARED_SECONDS", 1.0)
    for variable, value in shared.environment.items():
        monkeypatch.setenv(variable, value)
    assert job_server(name, command) == shared.address
    assert name not in servers._running
    shared.close()
    assert not shared.is_running()
    assert not shared.folder.exists()
    assert job_server(name, command) != shared.address
    assert servers._running[name].environment[VARIABLE] != shared.address


def test_job_server_that_ends_at_once_is_reported_with_its_output(name: str) -> None:
    program = (
        "raise SystemExit('Caused by: no such port\\n\\tat "
        "Server.java:41\\n\\t... 1 more')"
    )
    with pytest.raises(WorkerError, match=r"toy .*Caused by: no such port$"):
        job_server(name, lambda port, folder: [sys.executable, "-c", program])
    assert name not in servers._running
