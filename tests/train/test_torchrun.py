"""What torchrun's ranks find each other by can be reached from this machine alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gristmill.dataprep.files import read_json, write_json
from gristmill.flows.running.execute import torchrun_command
from gristmill.mixtures.manifest import Engine
from gristmill.train.parallel.world import single_process
from gristmill.train.rank import write_error

LOOPBACK = "0100007F"
"""127.0.0.1 as Linux's tables have it."""


LISTENERS = """
import os, re, sys
from pathlib import Path
from gristmill.mixtures.engine import Parallel
from gristmill.train.parallel.world import agree, process_group

def addresses(pid):
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    own = {link[8:-1] for link in links if link.startswith("socket:")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return sorted({row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in own})

with process_group() as world:
    told = agree("from the first", world)
    said = f"{world.rank} {world.size} {told} {addresses(os.getpid())} {addresses(os.getppid())}\\n"
    os.write(1, said.encode())  # whole lines: both ranks write into one pipe
"""


def test_on_one_machine_ranks_find_each_other_and_nobody_listens_beyond_the_loopback_address(tmp_path: Path) -> None:
    """Should an upgrade of torch open a store again, this says so."""
    (tmp_path / "ranks.py").write_text(LISTENERS)
    command = [*torchrun_command(tmp_path, ranks=2)[:-3], str(tmp_path / "ranks.py")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240, env={
        **os.environ, "GLOO_SOCKET_IFNAME": "lo"})
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} 2 from the first ['{LOOPBACK}'] []" for rank in (0, 1)]  # gloo's own sockets; torchrun has none


@pytest.mark.parametrize(("error", "message"), [
    (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    (torch.OutOfMemoryError("CUDA out of memory."),
     "CUDA out of memory; lower micro_batch_size: the training resumes from its last checkpoint"),
])
def test_a_rank_tells_its_reason_also_where_no_file_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    (tmp_path / "work").write_text("no folder")
    write_error(tmp_path, error)
    told = capsys.readouterr()
    assert json.loads(told.out.removeprefix("@gristmill ")) == {
        "event": "failed", "message": message, "is_consequence": False}
    assert "error.json cannot be written" in told.err


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


def test_when_a_rank_is_killed_that_is_told_and_the_others_are_ended(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [*torchrun_command(tmp_path, ranks=2)[:-3], str(tmp_path / "ranks.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env={**os.environ, "FOLDER": str(tmp_path)}) as process:
        try:
            assert process.stdout is not None
            event = json.loads(process.stdout.readline().removeprefix("@gristmill "))
            assert event["message"].startswith("rank 1 was killed (most likely out of memory")
            assert not event["is_consequence"]
            assert process.wait(timeout=120) != 0
        finally:
            process.kill()


def test_a_process_alone_listens_on_nothing_but_the_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # and as they were afterwards
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist, "TCPStore", None)
    with single_process() as world:
        assert (world.rank, world.size) == (0, 1)
        assert isinstance(dist.distributed_c10d._get_default_store(), dist.PrefixStore)
        assert isinstance(dist.distributed_c10d._get_default_store().underlying_store, dist.HashStore)


ON_TWO_NODES = """
import subprocess, sys
nodes = [subprocess.Popen(sys.argv[1:]) for _ in range(2)]
sys.exit(max(node.wait() for node in nodes))
"""


@pytest.mark.slow
def test_a_training_over_two_nodes_learns_what_one_node_does(
    tokenizer_folder: Path, mix_folder: Path, pretrain_config: dict[str, Any], tmp_path: Path
) -> None:
    """The nodes are processes of this machine, which a launcher starts as srun would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = tmp_path / "launcher.py"
    launcher.write_text(ON_TWO_NODES)
    several = {"GRISTMILL_NODES": "2", "GRISTMILL_RENDEZVOUS": f"127.0.0.1:{port}",
               "GRISTMILL_LAUNCHER": f"{sys.executable} {launcher}"}
    found = []
    for name, environment in (("one", {}), ("two", several)):
        write_json(tmp_path / name / "stage.json", {
            "stage": "pretrain", "run": "gristmill.train.stages.pretrain:run", "launch": "torchrun",
            "config": pretrain_config,
            "engine": {**Engine().model_dump(mode="json"), "ranks": 2},
            "inputs": [{"stage": "tokenizer", "folder": str(tokenizer_folder)},
                       {"stage": "mix", "folder": str(mix_folder)}]})
        command = [sys.executable, "-m", "gristmill.flows.running.execute", str(tmp_path / name)]
        settings = {**os.environ, **environment, "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, check=False, env=settings, timeout=300)
        assert done.returncode == 0
        assert read_json(tmp_path / name / "work" / "result.json")["world_size"] == 2
        found.append((tmp_path / name / "data" / "model" / "model.safetensors").read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize(("environment", "ranks", "sentence"), [
    ({"GRISTMILL_NODES": "2"}, 2, "GRISTMILL_RENDEZVOUS has to name HOST:PORT"),
    ({"GRISTMILL_NODES": "2", "GRISTMILL_RENDEZVOUS": "a:1", "GRISTMILL_LAUNCHER": "srun"}, 3, "engine.ranks is 3"),
])
def test_nodes_that_cannot_be_reached_or_shared_are_refused(
    environment: dict[str, str], ranks: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        torchrun_command(Path("stage"), ranks, environment)

