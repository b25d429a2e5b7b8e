"""Trainings that are killed, stopped and resumed, with one, two and four processes on
the loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.train.loop.metrics_log import TIMINGS
from tests.jsonl import read_metrics, write_jsonl
from tests.train.trained import assert_same_output

STEPS = 60


def write_stage(
    folder: Path,
    stage: str,
    inputs: dict[str, Path],
    config: dict[str, Any],
    every: int,
) -> None:
    """Write a stage folder for gristmill.train.worker_main."""
    (folder / "work").mkdir(parents=True, exist_ok=True)
    (folder / "stage.json").write_text(
        json.dumps(
            {
                "stage": stage,
                "run": f"gristmill.train.stages.{stage}:run",
                "config": config,
                "inputs": [
                    {"stage": name, "folder": str(path)}
                    for name, path in inputs.items()
                ],
                "engine": {
                    "checkpoint_every": every,
                    "keep_checkpoints": 2,
                    "stream": {},
                },
            }
        )
    )


@contextlib.contextmanager
def torchrun(folder: Path, ranks: int) -> Iterator[subprocess.Popen[str]]:
    """Run a stage folder under torchrun on the loopback, with events on standard
    output.
    """
    command = [
        sys.executable,
        "-m",
        "gristmill.train.torchrun",
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "-m",
        "gristmill.train.worker_main",
        str(folder),
    ]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Read events until the training reports that a step is done."""
    assert process.stdout is not None
    for line in process.stdout:
        if (
            line.startswith("@gristmill ")
            and json.loads(line[len("@gristmill ") :]).get("done", 0) >= step
        ):
            return
    raise AssertionError(f"the training ended before step {step}")


def finish(process: subprocess.Popen[str]) -> int:
    """Read all events to the end and return the exit code."""
    process.communicate()
    return process.returncode


def train(folder: Path, ranks: int) -> None:
    """Run a stage folder to its end."""
    with torchrun(folder, ranks) as process:
        assert finish(process) == 0, (folder / "log").read_text()


def without_timing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop metrics that differ between two runs of the same training."""
    return [
        {name: value for name, value in line.items() if name not in TIMINGS}
        for line in lines
    ]


@pytest.fixture
def config(pretrain_config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Settings whose batches of 7 rows and 3 questions do not divide among 2 or 4
    ranks.
    """
    questions = tmp_path / "questions.jsonl"
    write_jsonl(
        questions,
        [
            {
                "prompt": f"Return the {word}",
                "choices": ["text", "a", "json"],
                "answer": 1,
            }
            for word in ("module", "name", "object")
        ],
    )
    tasks = [{"name": "words", "path": str(questions), "kind": "multiple_choice"}]
    return {
        **pretrain_config,
        "steps": STEPS,
        "tasks": tasks,
        "global_batch_size": 7,
        "micro_batch_size": 2,
        "validate_every": 30,
        "log_every": 3,
        "optimizer": {"learning_rate": 0.002},
    }


@pytest.fixture
def undisturbed(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> Path:
    """The same training, uninterrupted, in one process."""
    run_stage(
        "pretrain", inputs, config, tmp_path / "undisturbed", checkpoint_every=1000
    )
    return tmp_path / "undisturbed"


@pytest.mark.slow
def test_killed_training_resumes_to_the_same_bits(
    run_stage: Any,
    undisturbed: Path,
    inputs: dict[str, Path],
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """A checkpoint after every step makes each kill hit its copying, writing or
    commit.
    """
    folder = tmp_path / "killed"
    write_stage(folder, "pretrain", inputs, config, every=1)
    for step in (12, 36):
        with torchrun(folder, 1) as process:
            wait_for_step(process, step)
            process.send_signal(signal.SIGKILL)
            # standard output closes only when the rank has died with torchrun
            finish(process)
    assert not (folder / "data").exists()
    assert not (folder / "work" / "result.json").exists()
    assert (
        len(list((folder / "work" / "checkpoints").glob("step-*/complete.json"))) >= 1
    )
    run_stage("pretrain", inputs, config, folder, checkpoint_every=10)
    assert without_timing(read_metrics(folder)) == without_timing(
        read_metrics(undisturbed)
    )
    assert_same_output(folder, undisturbed)


@pytest.mark.parallel
def test_two_ranks_resumed_as_four_train_alike(
    undisturbed: Path, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "elastic"
    write_stage(folder, "pretrain", inputs, config, every=1000)
    with torchrun(folder, 2) as process:
        wait_for_step(process, 9)
        process.send_signal(signal.SIGTERM)
        assert finish(process) != 0
    (checkpoint,) = (folder / "work" / "checkpoints").glob("step-*/complete.json")
    stopped = json.loads(checkpoint.read_text())["step"]
    assert 9 <= stopped < STEPS  # a checkpoint is saved on the way out
    assert not (folder / "data").exists()
    train(folder, 4)
    result = json.loads((folder / "work" / "result.json").read_text())
    assert (result["steps"], result["world_size"]) == (STEPS, 4)
    ours, theirs = read_metrics(folder), read_metrics(undisturbed)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, expected in zip(ours, theirs, strict=True):
        assert line.get("rows_digest") == expected.get("rows_digest")
        assert line.get("tokens") == expected.get("tokens")
        if "loss" in line:
            assert line["loss"] == pytest.approx(expected["loss"], abs=1e-4)
            assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        for source, measures in line.get("validation", {}).items():
            assert measures["loss"] == pytest.approx(
                expected["validation"][source]["loss"], abs=1e-4
            )
            assert measures["tokens"] == expected["validation"][source]["tokens"]
    assert ours[-1]["tasks"]["words"]["brier_score"] == pytest.approx(
        theirs[-1]["tasks"]["words"]["brier_score"], abs=1e-4
    )


@pytest.mark.slow
def test_error_is_recorded_and_ends_the_process(
    inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "wrong"
    write_stage(
        folder, "pretrain", {**inputs, "mix": tmp_path / "nowhere"}, config, every=10
    )
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    process = subprocess.run(
        [sys.executable, "-m", "gristmill.train.worker_main", str(folder)],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert process.returncode == 1
    assert (
        "packed.json"
        in json.loads((folder / "work" / "error.json").read_text())["message"]
    )
