"""One manifest, run by the same command on two hosts that share only a network and the
store.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.store_servers import AWS_CREDENTIALS
from gristmill.core.object_stores import VARIABLE
from tests.commands import GRISTMILL, finished
from tests.hosts import Host, hosts, store_beside, two_hosts
from tests.jsonl import write_jsonl
from tests.servers import wait_for

MANIFEST = """
name: two
seed: 3
sources: {docs: {path: "FOLDER/docs.jsonl"}}
tokenizer: {vocab_size: 400}
mix: {tokens: 9000, sequence_length: 32, validation: 0.02}
pretrain:
  model: {layers: 2, width: 32, heads: 4}
  steps: 24
  global_batch_size: 6
  micro_batch_size: 4
  log_every: 1
  callbacks: [{use: "./pause.py:after_step"}]
engine: {ranks: 2, checkpoint_every: 5, network: {timeout_seconds: 8, join_seconds: 120}}
"""
PAUSE = """
import os, time
from pathlib import Path

def after_step(metrics):
    if "PAUSED" not in os.environ:
        return
    folder = Path(os.environ["PAUSED"])
    is_full = os.environ["WORLD_SIZE"] == os.environ.get("FULL", os.environ["WORLD_SIZE"])
    if is_full and metrics["step"] >= int(os.environ.get("PAUSED_AT", "13")):
        (folder / "reached").touch()
        while not (folder / "cut").exists():
            time.sleep(0.05)
    # two steps before a checkpoint
    if metrics["step"] % 5 == 3:
        waiting = f"**/hosts/{os.environ['TORCHELASTIC_RUN_ID']}/waiting"
        while not is_full and (folder / "comes").exists() and not list(folder.glob(waiting)):
            time.sleep(0.05)
"""
"""Callback that pauses a training of all FULL ranks until the test has cut off a host,
and a smaller one until another host waits to join, while the file `comes` exists.
"""
BOUND_SECONDS = 100.0
"""Time for both hosts to report that they lost each other: 8 s, and the time of a busy
machine to end its processes.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest, its documents, and a store with all stages up to the packed set."""
    folder = tmp_path_factory.mktemp("hosts")
    texts = [
        str(inspect.getdoc(function))
        for module in (json, contextlib, textwrap, socket, inspect, shutil, os)
        for function in (module, *vars(module).values())
        if inspect.getdoc(function)
    ]
    write_jsonl(
        folder / "docs.jsonl", [{"text": text} for text in dict.fromkeys(texts)]
    )
    (folder / "m.yaml").write_text(MANIFEST.replace("FOLDER", str(folder)))
    (folder / "pause.py").write_text(PAUSE)
    finished(
        [
            *GRISTMILL,
            "run",
            str(folder / "m.yaml"),
            "--until",
            "mix",
            "--no-ui",
            "--store",
            str(folder / "prepared"),
        ],
        timeout=280,
    )
    return folder


@contextlib.contextmanager
def running(
    host: Host, command: list[str], **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a command on a host, and end its processes on exit."""
    process = host.start(
        command,
        {**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.communicate()


def wait_until_it_leads(run: subprocess.Popen[str]) -> str:
    """Wait until a run announces that it waits for other hosts, and the command for
    them; consumes its output.
    """
    assert run.stdout is not None
    waiting = next(line for line in run.stdout if "waiting at" in line)
    return waiting.partition("start the same gristmill command on them, or ")[2]


def stage_folder(store: Path, stage: str) -> Path:
    (output_folder,) = (store / stage).iterdir()
    return output_folder


def losses(store: Path) -> dict[int, float]:
    lines = (
        (stage_folder(store, "pretrain") / "data" / "metrics.jsonl")
        .read_text()
        .splitlines()
    )
    return {
        line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("leads", [False, True])
def test_disconnected_host_is_named_and_the_other_resumes_with_equal_losses(
    leads: bool, folder: Path, tmp_path: Path
) -> None:
    """The lost host is the leader, which has the store that connects all ranks, or a
    follower.
    """
    for name in ("undisturbed", "store"):
        shutil.copytree(folder / "prepared", tmp_path / name, symlinks=True)
    command = [*GRISTMILL, "run", str(folder / "m.yaml"), "--no-ui", "--store"]
    finished([*command, str(tmp_path / "undisturbed")], timeout=280)
    store = tmp_path / "store"
    together = [*command, str(store), "--set", "engine.nodes=2"]
    with two_hosts() as (first, second):
        begins, joins = (second, first) if leads else (first, second)
        with contextlib.ExitStack() as stack:
            leader = stack.enter_context(
                running(begins, together, PAUSED=str(tmp_path))
            )
            wait_until_it_leads(leader)
            follower = stack.enter_context(
                running(joins, together, PAUSED=str(tmp_path))
            )
            wait_for((tmp_path / "reached").exists, "the thirteenth step on two hosts")
            second.cut_off()
            (tmp_path / "cut").touch()
            outputs = [
                process.communicate(timeout=BOUND_SECONDS)[0]
                for process in (leader, follower)
            ]
        assert [leader.returncode, follower.returncode] == [1, 1], "\n".join(outputs)
        for text in outputs:
            assert (
                "(engine.network.timeout_seconds)" in text or "has given up" in text
            ), text
            assert "resumes from its last checkpoint" in text
            assert "Traceback" not in text
        assert any(
            f"{name} (rank" in " ".join(outputs) for name in ("host-a", "host-b")
        )
        with running(
            first, [*command, str(store), "--set", "engine.nodes=1"]
        ) as resumed:
            text = resumed.communicate(timeout=400)[0]
        assert resumed.returncode == 0, text
        assert "Resumed" in text
    assert_same_training(store, tmp_path / "undisturbed")


COPY = """
import sys
from gristmill.core.files import as_path
store = as_path("s3://shared/store")
getattr(store.fs, sys.argv[1])(*(sys.argv[2:3] + [store.path] if sys.argv[1] == "put" else [store.path, sys.argv[2]]),
                               recursive=True)
"""
"""Script that sends a folder to the store, or fetches it, on a host that reaches the
store.
"""


def store_environment(url: str, tmp_path: Path) -> dict[str, str]:
    """Environment of a host that reaches the object store at a URL."""
    return {
        **AWS_CREDENTIALS,
        "AWS_ENDPOINT_URL": url,
        VARIABLE: "10",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def copy(host: Host, environment: dict[str, str], *arguments: str) -> None:
    """Send a folder to the object store, or fetch it, on a host."""
    with running(host, [sys.executable, "-c", COPY, *arguments], **environment) as run:
        assert "Error" not in run.communicate(timeout=120)[0]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_training_on_an_object_store_survives_a_disconnected_host_and_resumes_on_any_number(
    folder: Path, tmp_path: Path
) -> None:
    """Two hosts train in separate folders; one resumes alone and is stopped; two
    finish, one of them by the command that the other prints.
    """
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    shutil.copytree(folder / "prepared", tmp_path / "undisturbed", symlinks=True)
    command = [*GRISTMILL, "run", str(folder / "m.yaml"), "--no-ui", "--store"]
    finished([*command, str(tmp_path / "undisturbed")], timeout=280)
    with two_hosts() as hosts, store_beside(hosts, "shared") as urls:
        first, second = hosts
        environments = {
            host.name: store_environment(urls[host.name], tmp_path) for host in hosts
        }

        def start(
            host: Host, nodes: int, **paused: str
        ) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
            settings = [
                "--set",
                f"engine.nodes={nodes}",
                "--set",
                f"engine.network.interface={host.interface}",
            ]
            return running(
                host,
                [*command, "s3://shared/store", *settings],
                **environments[host.name],
                **paused,
            )

        copy(first, environments[first.name], "put", f"{folder / 'prepared'}/")
        with (
            start(first, 2, PAUSED=str(tmp_path)) as leader,
            contextlib.ExitStack() as joining,
        ):
            wait_until_it_leads(leader)
            follower = joining.enter_context(start(second, 2, PAUSED=str(tmp_path)))
            wait_for((tmp_path / "reached").exists, "the thirteenth step on two hosts")
            second.cut_off()
            (tmp_path / "cut").touch()
            outputs = [
                process.communicate(timeout=2 * BOUND_SECONDS)[0]
                for process in (leader, follower)
            ]
        assert [leader.returncode, follower.returncode] == [1, 1], "\n".join(outputs)
        assert "resumes from its last checkpoint" in outputs[0], outputs[0]
        assert "could not be reached" in outputs[1], outputs[1]
        assert all("Traceback" not in text for text in outputs), "\n".join(outputs)
        for name in ("reached", "cut"):
            (tmp_path / name).unlink()
        with start(first, 1, PAUSED=str(tmp_path), PAUSED_AT="18") as resumed:
            wait_for((tmp_path / "reached").exists, "the eighteenth step on one host")
            os.kill(resumed.pid, signal.SIGTERM)
            (tmp_path / "cut").touch()
            text = resumed.communicate(timeout=BOUND_SECONDS)[0]
        assert resumed.returncode not in (0, 1), text
        second.connect()
        with start(first, 2) as leader:
            printed = wait_until_it_leads(leader)
            with running(
                second, ["sh", "-c", printed], **environments[second.name]
            ) as follower:
                outputs = [
                    process.communicate(timeout=400)[0]
                    for process in (leader, follower)
                ]
        assert [leader.returncode, follower.returncode] == [0, 0], "\n".join(outputs)
        assert any("Resumed" in text for text in outputs)
        assert (
            list((tmp_path / "cache" / "gristmill" / "stream" / "training").iterdir())
            == []
        )
        copy(first, environments[first.name], "get", str(tmp_path / "fetched"))
    assert_same_training(tmp_path / "fetched", tmp_path / "undisturbed")


def assert_same_training(store: Path, undisturbed: Path) -> None:
    """Assert that two stores have the same losses and the same model."""
    assert losses(store) == losses(undisturbed)
    models = [
        (
            stage_folder(root, "pretrain") / "data" / "model" / "model.safetensors"
        ).read_bytes()
        for root in (store, undisturbed)
    ]
    assert models[0] == models[1]


STEPS = 39
ELASTIC = (
    f"pretrain.steps={STEPS}",
    "engine.permanent_every=1",
    "engine.network.timeout_seconds=20",
)


def started(run: list[str], *settings: str) -> list[str]:
    """A command with settings."""
    return [*run, *(part for setting in settings for part in ("--set", setting))]


def metrics_lines(store: Path) -> list[dict[str, Any]]:
    text = (stage_folder(store, "pretrain") / "data" / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "loss" in line]


def resume_on_one_host(
    folder: Path, store: Path, reference: Path, step: int, ranks: int
) -> dict[int, float]:
    """Losses of a training that is started with some ranks from a checkpoint of another
    store.
    """
    shutil.copytree(folder / "prepared", reference, symlinks=True)
    output = stage_folder(store, "pretrain")
    checkpoint = f"work/checkpoints/step-{step:08d}"
    shutil.copytree(
        output / checkpoint, reference / "pretrain" / output.name / checkpoint
    )
    command = [*GRISTMILL, "run", str(folder / "m.yaml"), "--no-ui", "--store"]
    run = finished(
        started([*command, str(reference)], *ELASTIC, f"engine.ranks={ranks}"),
        timeout=280,
    )
    assert "Resumed" in run.stdout
    return losses(reference)


def assert_attempts_equal_trainings_of_their_size(
    folder: Path, store: Path, tmp_path: Path
) -> list[dict[str, Any]]:
    """Assert that each attempt at a training has the losses of one that is started with
    its ranks from its checkpoint, and the last one its weights, and that the rows are
    those of an undisturbed training; returns the attempts.
    """
    manifest = json.loads(
        (stage_folder(store, "pretrain") / "manifest.json").read_text()
    )
    attempts: list[dict[str, Any]] = manifest["attempts"]
    ends = [attempt["after_step"] for attempt in attempts[1:]] + [STEPS]
    measured = losses(store)
    for number, (attempt, end) in enumerate(zip(attempts, ends, strict=True)):
        begin = attempt["after_step"]
        if begin == 0:
            continue
        reference = tmp_path / f"reference-{number}"
        expected = resume_on_one_host(
            folder, store, reference, begin, len(attempt["hosts"])
        )
        assert [measured[step] for step in range(begin + 1, end + 1)] == [
            expected[step] for step in range(begin + 1, end + 1)
        ]
    models = [
        (
            stage_folder(root, "pretrain") / "data" / "model" / "model.safetensors"
        ).read_bytes()
        for root in (store, reference)
    ]
    assert models[0] == models[1]
    shutil.copytree(folder / "prepared", tmp_path / "undisturbed", symlinks=True)
    command = [*GRISTMILL, "run", str(folder / "m.yaml"), "--no-ui", "--store"]
    finished(
        started([*command, str(tmp_path / "undisturbed")], *ELASTIC, "engine.ranks=1"),
        timeout=280,
    )
    lines = [metrics_lines(root) for root in (store, tmp_path / "undisturbed")]
    assert [line["step"] for line in lines[0]] == list(range(1, STEPS + 1))
    for key in ("step", "tokens", "rows_digest"):
        assert [line[key] for line in lines[0]] == [line[key] for line in lines[1]]
    assert measured == pytest.approx(losses(tmp_path / "undisturbed"), rel=1e-4)
    return attempts


def wait_until_it_runs_on(run: subprocess.Popen[str], hosts: str) -> None:
    """Wait until the leading run says that the training goes on on other hosts than
    before; consumes its output.
    """
    assert run.stdout is not None
    assert any(re.search(rf"after step \d+ on {hosts};", line) for line in run.stdout)


@pytest.mark.chaos
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("lost", ["killed", "disconnected"])
def test_training_goes_on_without_a_lost_host_and_takes_it_up_when_it_is_back(
    lost: str, folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(folder / "prepared", store, symlinks=True)
    together = started(
        [*GRISTMILL, "run", str(folder / "m.yaml"), "--no-ui", "--store", str(store)],
        *ELASTIC,
        "engine.nodes=2",
        "engine.min_nodes=1",
    )
    paused = {"PAUSED": str(tmp_path), "FULL": "2"}
    (tmp_path / "comes").touch()
    with two_hosts() as (first, second), contextlib.ExitStack() as stack:
        leader = stack.enter_context(running(first, together, **paused))
        wait_until_it_leads(leader)
        follower = stack.enter_context(running(second, together, **paused))
        wait_for((tmp_path / "reached").exists, "the thirteenth step", 600.0)
        if lost == "killed":
            second.kill()
        else:
            second.cut_off()
        (tmp_path / "cut").touch()
        wait_until_it_runs_on(leader, "host-a")
        if lost == "killed":
            follower = stack.enter_context(running(second, together, **paused))
        else:
            second.connect()
        outputs = [
            process.communicate(timeout=900)[0] for process in (leader, follower)
        ]
    assert [leader.returncode, follower.returncode] == [0, 0], "\n".join(outputs)
    attempts = assert_attempts_equal_trainings_of_their_size(folder, store, tmp_path)
    alone = [attempt for attempt in attempts if attempt["lost"]]
    assert [attempt["hosts"] for attempt in alone] == [["host-a"]] * len(alone)
    assert [attempt["lost"] for attempt in alone] == [["host-b"]] * len(alone)
    assert alone
    assert attempts[-1]["hosts"] == ["host-a", "host-b"]
    entries = [
        json.loads(file.read_text())["stages"].get("pretrain", {})
        for file in (store / "runs").glob("*/run.json")
    ]
    recorded = [entry["attempts"] for entry in entries if "attempts" in entry]
    assert recorded == [attempts, attempts]


@pytest.mark.chaos
@pytest.mark.parallel
@pytest.mark.timeout(2400)
def test_another_host_leads_after_the_leading_one_is_lost(
    folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(folder / "prepared", store, symlinks=True)
    together = started(
        [*GRISTMILL, "run", str(folder / "m.yaml"), "--no-ui", "--store", str(store)],
        *ELASTIC,
        "engine.nodes=3",
        "engine.ranks=3",
        "engine.min_nodes=2",
    )
    paused = {"PAUSED": str(tmp_path), "FULL": "3"}
    (tmp_path / "comes").touch()
    with (
        hosts("host-a", "host-b", "host-c") as (first, second, third),
        contextlib.ExitStack() as stack,
    ):
        leader = stack.enter_context(running(second, together, **paused))
        wait_until_it_leads(leader)
        followers = [
            stack.enter_context(running(host, together, **paused))
            for host in (first, third)
        ]
        wait_for((tmp_path / "reached").exists, "the thirteenth step", 600.0)
        (tmp_path / "comes").unlink()
        second.kill()
        (tmp_path / "cut").touch()
        outputs = [process.communicate(timeout=900)[0] for process in followers]
    assert [run.returncode for run in followers] == [0, 0], "\n".join(outputs)
    attempts = assert_attempts_equal_trainings_of_their_size(folder, store, tmp_path)
    assert [attempt["hosts"] for attempt in attempts[-2:]] == [
        ["host-a", "host-b", "host-c"],
        ["host-a", "host-c"],
    ]
    assert attempts[-1]["lost"] == ["host-b"]
