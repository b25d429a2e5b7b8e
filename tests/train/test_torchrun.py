"""Rendezvous of torchrun ranks: sockets on the loopback address only, failures, and
several hosts.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from gristmill.core.files import read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.flows.running.execute import torchrun_command
from gristmill.flows.running.follow_leader import MODULE as TAKE_PART
from gristmill.mixtures.schema.engine import Engine
from gristmill.train.distributed import rendezvous
from gristmill.train.distributed.elastic_rendezvous import register
from gristmill.train.distributed.process_groups import DIMENSIONS, single_process
from gristmill.train.worker_main import write_error
from tests.servers import free_port, wait_for

LOOPBACK = "0100007F"
"""127.0.0.1 in the socket tables of Linux."""


LISTENERS = """
import os, re, sys
from pathlib import Path
from gristmill.mixtures.schema.engine import Parallel
from gristmill.train.distributed.process_groups import agree, process_group

def addresses(pid):
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    own = {link[8:-1] for link in links if link.startswith("socket:")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return sorted({row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in own})

with process_group() as world:
    agreed = agree("from the first", world)
    line = f"{world.rank} {world.size} {agreed} {addresses(os.getpid())} {addresses(os.getppid())}\\n"
    os.write(1, line.encode())  # whole lines: both ranks write into one pipe
"""


@pytest.mark.slow
def test_ranks_of_one_machine_listen_on_the_loopback_address_only(
    tmp_path: Path,
) -> None:
    """Fails if an upgrade of torch opens a store again."""
    (tmp_path / "ranks.py").write_text(LISTENERS)
    command = [*torchrun_command(tmp_path, ranks=2)[:-3], str(tmp_path / "ranks.py")]
    process = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert sorted(process.stdout.splitlines()) == [
        f"{rank} 2 from the first ['{LOOPBACK}'] []" for rank in (0, 1)
    ]  # gloo's own sockets; torchrun has none


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            "CUDA out of memory; lower micro_batch_size: the training resumes from "
            "its last checkpoint",
        ),
    ],
)
def test_rank_reports_its_error_if_no_file_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    (tmp_path / "work").write_text("no folder")
    write_error(tmp_path, error)
    captured = capsys.readouterr()
    assert json.loads(captured.out.removeprefix("@gristmill ")) == {
        "event": "failed",
        "message": message,
        "is_consequence": False,
        "is_killed": False,
    }
    assert "error.json cannot be written" in captured.err


RANKS = """
import os, signal, time
ready = os.path.join(os.environ["FOLDER"], "ready")
if os.environ["RANK"] == "1":
    while not os.path.exists(ready):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
os.mkdir(ready)
time.sleep(600)
"""


@pytest.mark.slow
def test_killed_rank_is_reported_and_others_are_terminated(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [*torchrun_command(tmp_path, ranks=2)[:-3], str(tmp_path / "ranks.py")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "FOLDER": str(tmp_path)},
    ) as process:
        try:
            assert process.stdout is not None
            event = json.loads(process.stdout.readline().removeprefix("@gristmill "))
            assert "rank 1" in event["message"]
            assert (event["is_consequence"], event["is_killed"]) == (False, True)
            assert process.wait(timeout=120) != 0
        finally:
            process.kill()


def test_single_process_opens_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "")  # restored after the test
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist, "TCPStore", None)
    with single_process() as world:
        assert (world.rank, world.size) == (0, 1)
        assert isinstance(dist.distributed_c10d._get_default_store(), dist.PrefixStore)
        assert isinstance(
            dist.distributed_c10d._get_default_store().underlying_store, dist.HashStore
        )


@pytest.mark.slow
def test_training_on_two_hosts_equals_that_on_one(
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Hosts are processes of this machine: one leads, and the other follows until it is
    terminated.
    """
    network = {
        "interface": "lo",
        "port": free_port(),
        "join_seconds": 200,
        "timeout_seconds": 200,
    }
    weights = []
    for name, nodes in (("one", 1), ("two", 2)):
        engine = Engine.model_validate({"ranks": 2, "nodes": nodes, "network": network})
        write_json(
            tmp_path / name / "stage.json",
            {
                "stage": "pretrain",
                "run": "gristmill.train.stages.pretrain:run",
                "launch": "torchrun",
                "config": pretrain_config,
                "engine": engine.model_dump(mode="json"),
                "inputs": [
                    {"stage": "tokenizer", "folder": str(tokenizer_folder)},
                    {"stage": "mix", "folder": str(mix_folder)},
                ],
            },
        )
        command = [
            sys.executable,
            "-m",
            "gristmill.flows.running.execute",
            str(tmp_path / name),
        ]
        with subprocess.Popen(
            [sys.executable, "-m", TAKE_PART, str(tmp_path / name), "lo"]
        ) as follower:
            try:
                process = subprocess.run(
                    command,
                    check=False,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                    timeout=280,
                )
                assert process.returncode == 0
            finally:
                follower.terminate()
        assert read_json(tmp_path / name / "work" / "result.json")["world_size"] == 2
        weights.append(
            (tmp_path / name / "data" / "model" / "model.safetensors").read_bytes()
        )
        assert (tmp_path / name / "work" / "rendezvous.json").exists() == (nodes == 2)
    assert weights[0] == weights[1]


def test_command_of_a_host_names_leader_and_timeouts(tmp_path: Path) -> None:
    engine = Engine.model_validate(
        {
            "ranks": 8,
            "nodes": 2,
            "network": {
                "interface": "lo",
                "port": 4321,
                "join_seconds": 30,
                "timeout_seconds": 7,
            },
        }
    )
    leader = rendezvous.lead(tmp_path, engine)
    assert rendezvous.read_rendezvous(tmp_path) == leader
    assert leader.command(tmp_path, leads=False)[3:] == [
        "--nnodes=2:2",
        "--nproc-per-node=4",
        "--rdzv-backend=gristmill",
        "--rdzv-endpoint=127.0.0.1:4321",
        f"--rdzv-id={leader.name}",
        "--rdzv-conf=is_host=0,join_timeout=30,last_call_timeout=30,read_timeout=7",
        "-m",
        "gristmill.train.worker_main",
        str(tmp_path),
    ]
    assert read_json(tmp_path / "work" / "rendezvous.json")["command"] == shlex.join(
        leader.command(tmp_path, leads=False)
    )
    assert "is_host=1" in leader.command(tmp_path, leads=True)[8]


def test_ranks_are_divided_evenly_among_hosts() -> None:
    assert rendezvous.hosts_of(Engine(nodes=16, ranks=1)) == 1
    assert rendezvous.hosts_of(Engine(nodes=2, ranks=4)) == 2
    with pytest.raises(ValueError, match=r"ranks is 3.* nodes"):
        Engine(nodes=2, ranks=3)


def test_unreachable_hosts_are_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Engine(ranks=2, nodes=2)
    with pytest.raises(rendezvous.HostsError, match=r"ib7.* lo"):
        rendezvous.address_of("ib7")

    def no_route(host: str, port: int) -> str:
        raise rendezvous.HostsError("no route")

    monkeypatch.setattr(rendezvous, "address_towards", no_route)
    monkeypatch.setattr(
        rendezvous, "addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5"}
    )
    assert rendezvous.default_address() == "10.0.0.5"
    monkeypatch.setattr(
        rendezvous,
        "addresses",
        lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"},
    )
    with pytest.raises(rendezvous.HostsError, match="eth0, ib0"):
        rendezvous.lead(tmp_path, engine)


def test_process_groups_have_our_timeout(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rendezvous.TIMEOUT, "7.5")
    with single_process() as world:
        groups = [
            dist.group.WORLD,
            *(world.mesh.get_group(name) for name in DIMENSIONS),
        ]
        timeouts = {
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in groups
        }
    assert timeouts == {7.5}


def test_hosts_may_be_fewer_than_nodes(tmp_path: Path) -> None:
    engine = Engine.model_validate(
        {
            "ranks": 8,
            "nodes": 4,
            "min_nodes": 2,
            "parallel": {"replicate": 2},
            "network": {"interface": "lo", "last_call_seconds": 5},
        }
    )
    command = rendezvous.lead(tmp_path, engine).command(tmp_path, leads=True)
    assert command[3:5] == ["--nnodes=2:4", "--nproc-per-node=2"]
    assert "last_call_timeout=5" in command[8]


@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": 2, "min_nodes": 3},
        {"nodes": 2, "min_nodes": 1, "ranks": 4, "parallel": {"shard": 4}},
        {"nodes": 4, "min_nodes": 2, "ranks": 4, "parallel": {"replicate": 2}},
    ],
)
def test_layouts_that_do_not_fit_fewer_hosts_are_rejected(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="min_nodes"):
        Engine.model_validate(settings)


def test_leading_host_is_first_and_late_hosts_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hosts; the leading one has the second address, and the third one is
    late.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    register(tmp_path)
    waiting = rendezvous.waiting_file(tmp_path / "work", "attempt")

    def handler(number: int) -> RendezvousHandler:
        return rendezvous_handler_registry.create_handler(
            RendezvousParameters(
                rendezvous.BACKEND,
                str(tmp_path / "rendezvous"),
                "attempt",
                2,
                3,
                f"127.0.0.{number}",
                store_type="file",
                is_host=str(int(number == 2)),
                join_timeout="60",
                last_call_timeout="1",
            )
        )

    first, leading, late = map(handler, (1, 2, 3))
    with ThreadPoolExecutor() as pool:
        try:
            meetings = [pool.submit(host.next_rendezvous) for host in (first, leading)]
            infos = [meeting.result(timeout=120) for meeting in meetings]
            assert [(info.rank, info.world_size) for info in infos] == [(1, 2), (0, 2)]
            assert (leading.num_nodes_waiting(), waiting.exists()) == (0, False)
            joining = pool.submit(late.next_rendezvous)
            wait_for(
                lambda: leading.num_nodes_waiting() or waiting.exists(), "the late host"
            )
            assert leading.num_nodes_waiting() == first.num_nodes_waiting() == 0
        finally:
            leading.shutdown()
        with pytest.raises(RendezvousClosedError):
            joining.result(timeout=120)


def test_attempts_list_lost_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[dict[str, object]] = []
    context = Context(tmp_path, "pretrain", emit=events.append)
    for number, hosts in enumerate((["a", "b"], ["a"], ["a", "c"])):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"attempt-{number}")
        for rank, host in enumerate(hosts):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            for name, value in (
                ("RANK", rank),
                ("GROUP_RANK", rank),
                ("LOCAL_RANK", 0),
            ):
                monkeypatch.setenv(name, str(value))
            rendezvous.note_arrival(tmp_path)
        rendezvous.record_attempt(context, tmp_path, step=10 * number)
    attempts = read_json(tmp_path / rendezvous.ATTEMPTS)
    assert [
        (attempt["after_step"], attempt["hosts"], attempt["lost"])
        for attempt in attempts
    ] == [(0, ["a", "b"], []), (10, ["a"], ["b"]), (20, ["a", "c"], [])]
    assert [event["event"] for event in events] == ["warning", "warning"]


ABORTING = "import os; os.abort()"


@pytest.mark.slow
def test_aborted_rank_counts_as_lost_hosts(tmp_path: Path) -> None:
    """NCCL aborts a rank that waits for a lost host."""
    (tmp_path / "rank.py").write_text(ABORTING)
    (tmp_path / "stage" / "work").mkdir(parents=True)
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "gristmill.train.torchrun",
            "--nnodes=1:2",
            f"--rdzv-backend={rendezvous.BACKEND}",
            f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            "--rdzv-id=attempt",
            "--rdzv-conf=is_host=1,join_timeout=60,last_call_timeout=1",
            str(tmp_path / "rank.py"),
            str(tmp_path / "stage"),
        ],
        check=False,
        capture_output=True,
        timeout=240,
    )
    assert process.returncode == 1
    error = read_json(tmp_path / "stage" / "work" / "error.json")
    assert error["type"] == rendezvous.HOSTS_CHANGED
