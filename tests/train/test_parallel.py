"""Every parallel form trains like a single process, and resumes from the checkpoint of
any other form.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkout import ROOT
from benchmarks.train.held_gradients import held_gradients
from benchmarks.train.parallel_forms import ROUNDING, differences_of
from gristmill.mixtures.schema.engine import Engine, Parallel
from gristmill.train.distributed.tensor import UnevenSplitError, split_matrices
from gristmill.train.models.model_config import Shape
from gristmill.train.models.transformer import Llama
from tests.jsonl import read_metrics
from tests.train.trained import weights_of

WORKER = "tests.train.parallel_worker"
STEPS, CHECKPOINT = 3, 2
FORMS: dict[int, list[dict[str, int]]] = {
    2: [{"shard": 2}, {"context": 2}, {"replicate": 2}, {"tensor": 2}],
    4: [
        {"replicate": 2, "shard": 2},
        {"shard": 2, "tensor": 2},
        {"replicate": 2, "tensor": 2},
        {"context": 2, "tensor": 2},
        {"shard": 2, "context": 2},
        {"context": 4},
    ],
}


@pytest.fixture
def config(pretrain_config: dict[str, Any]) -> dict[str, Any]:
    """Batches of 7 rows in micro-batches of 2, which no number of processes divides."""
    model = {
        **pretrain_config["model"],
        "qk_norm": True,
        "document_mask": True,
        "tied_embeddings": False,
    }
    return {
        **pretrain_config,
        "model": model,
        "steps": STEPS,
        "global_batch_size": 7,
        "micro_batch_size": 2,
        "validate_every": STEPS,
        "optimizer": {"learning_rate": 0.002},
        "z_loss": 1e-3,
    }


@pytest.fixture
def alone(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> Path:
    """A training in one process, with its checkpoint."""
    run_stage(
        "pretrain", inputs, config, tmp_path / "alone", checkpoint_every=CHECKPOINT
    )
    return tmp_path / "alone"


def train_on(ranks: int, jobs: list[dict[str, Any]], folder: Path) -> None:
    """Run trainings in turn on some processes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    process = subprocess.run(
        [sys.executable, "-m", WORKER, str(ranks), str(folder / "jobs.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stderr[-6000:]


def assert_same(folder: Path, expected: Path, first_step: int) -> None:
    """Check that losses and gradient norms from a step on, validations and weights are
    equal up to rounding.
    """
    ours, theirs = (read_metrics(run) for run in (folder, expected))
    theirs = [line for line in theirs if line["step"] >= first_step]
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, reference in zip(ours, theirs, strict=True):
        assert line.get("rows_digest") == reference.get("rows_digest")
        if "loss" in line:
            assert line["loss"] == pytest.approx(reference["loss"], abs=1e-5)
            assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
        for source, measures in line.get("validation", {}).items():
            assert measures["loss"] == pytest.approx(
                reference["validation"][source]["loss"], abs=1e-5
            )
            assert measures["tokens"] == reference["validation"][source]["tokens"]
    ours_weights, their_weights = weights_of(folder), weights_of(expected)
    assert ours_weights.keys() == their_weights.keys()
    for name, tensor in their_weights.items():
        # AdamW moves a weight of nearly zero gradient by the learning rate, in a
        # direction that rounding decides.
        torch.testing.assert_close(ours_weights[name], tensor, atol=2e-3, rtol=0)
        assert (ours_weights[name] - tensor).abs().mean() < 1e-5, name


@pytest.mark.slow
def test_sharded_experts_with_checkpointing_train_alike(
    run_stage: Any, inputs: dict[str, Path], config: dict[str, Any], tmp_path: Path
) -> None:
    """The load balancing loss is computed per row, so that it does not depend on the
    rows of a process.
    """
    experts = {
        **config,
        "model": {**config["model"], "moe": {"experts": 4, "load_balancing": 1.0}},
    }
    run_stage("pretrain", inputs, experts, tmp_path / "alone")
    train_on(
        2,
        [
            {
                "parallel": {"shard": 2},
                "compute": {"activation_checkpointing": "selective"},
                "config": experts,
                "checkpoint_every": CHECKPOINT,
                "inputs": {name: str(path) for name, path in inputs.items()},
                "folder": str(tmp_path / "sharded"),
                "continue": None,
            }
        ],
        tmp_path,
    )
    assert_same(tmp_path / "sharded", tmp_path / "alone", first_step=1)
    loads = [
        [
            json.loads(line).get("experts")
            for line in (tmp_path / name / "data" / "metrics.jsonl").open()
        ]
        for name in ("alone", "sharded")
    ]
    assert loads[0] == loads[1]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(ranks, marks=[pytest.mark.parallel] if ranks > 2 else [])
        for ranks in FORMS
    ],
)
def test_every_form_trains_alike_and_resumes_from_every_other(
    ranks: int,
    alone: Path,
    inputs: dict[str, Path],
    config: dict[str, Any],
    tmp_path: Path,
    run_stage: Any,
) -> None:
    """Each form trains from the start, and from the checkpoint of the previous form;
    the first resumes that of the single process, which resumes the last.
    """
    jobs, before = [], alone
    for number, parallel in enumerate(FORMS[ranks]):
        fresh, resumed = (
            tmp_path / f"{kind}-{number}" for kind in ("fresh", "resumed")
        )
        common = {
            "parallel": parallel,
            "config": config,
            "checkpoint_every": CHECKPOINT,
            "inputs": {name: str(path) for name, path in inputs.items()},
        }
        jobs += [
            {**common, "folder": str(fresh), "continue": None},
            {**common, "folder": str(resumed), "continue": str(before)},
        ]
        before = fresh
    train_on(ranks, jobs, tmp_path)
    for number in range(len(FORMS[ranks])):
        assert_same(tmp_path / f"fresh-{number}", alone, first_step=1)
        assert_same(tmp_path / f"resumed-{number}", alone, first_step=CHECKPOINT + 1)
    shutil.copytree(
        before / "work" / "checkpoints", tmp_path / "plain" / "work" / "checkpoints"
    )
    run_stage(
        "pretrain", inputs, config, tmp_path / "plain", checkpoint_every=CHECKPOINT
    )
    assert_same(tmp_path / "plain", alone, first_step=CHECKPOINT + 1)


@pytest.mark.parallel
def test_product_of_three_forms_trains_alike() -> None:
    """The other products are rows of `gristmill bench forms`."""
    (steps,) = differences_of(8, [{"replicate": 2, "shard": 2, "tensor": 2}]).values()
    assert len(steps) == 3
    assert steps[-1].keys() == ROUNDING.keys()
    for step in steps:
        for name, difference in step.items():
            assert difference < ROUNDING[name], name


@pytest.mark.slow
def test_failed_fork_ends_the_other_processes() -> None:
    program = """
import os, signal
from benchmarks.train.forked_ranks import fork_ranks

def work():
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 of " + os.environ["WORLD_SIZE"])
    signal.pause()

fork_ranks(2, work)
"""
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
    )
    assert process.returncode == 1
    assert "ValueError: rank 1 of 2" in process.stderr
    assert "2 processes" in process.stderr.splitlines()[-1]


@pytest.mark.slow
def test_gradients_are_sharded_between_micro_batches() -> None:
    """Float32 sums take 4 bytes per weight, divided by the processes that share it, and
    gradients of 8 to 32 micro-batches equal those of one process.
    """
    by_form = held_gradients()
    assert {name: values["bytes_per_weight"] for name, values in by_form.items()} == {
        "shard 4": pytest.approx(1.0, abs=0.01),
        "context 4": pytest.approx(1.0, abs=0.01),
        "replicate 2 x shard 2": pytest.approx(2.0, abs=0.01),
        "adapters, shard 4": pytest.approx(1.0, abs=0.01),
    }
    assert max(values["difference"] for values in by_form.values()) < 1e-5


def test_product_of_sizes_must_equal_the_number_of_ranks() -> None:
    assert Parallel(tensor=2).sizes(8) == (1, 4, 1, 2)
    assert Parallel(replicate=2, context=2, tensor=2).sizes(8) == (2, 1, 2, 2)
    assert Parallel(context=2, tensor=2).sizes(8) == (1, 2, 2, 2)
    assert Parallel(context=2, tensor=2).sizes(8, split_rows=False) == (1, 4, 1, 2)
    form = Parallel(context=2, tensor=2, replicate=2)
    assert form.sizes(8, split_rows=False, split=False) == (2, 4, 1, 1)
    with pytest.raises(
        ValueError, match=r"replicate 1 x .* x context 1 x tensor 4 .*4 .*ranks is 2"
    ):
        Engine(ranks=2, parallel=Parallel(tensor=4))
    with pytest.raises(ValueError, match=r"6 processes.* ranks is 4"):
        Engine(ranks=4, parallel=Parallel(replicate=2, shard=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 1}, r"tensor is 2.* kv_heads \(1\)"),
        ({"experts": 2, "experts_per_token": 1}, "mixture of experts .*shard"),
    ],
)
def test_model_that_cannot_be_split_is_rejected(
    changes: dict[str, int], message: str, tiny_shape: Shape
) -> None:
    class Mesh:
        @staticmethod
        def size() -> int:
            return 2

    with torch.device("meta"), pytest.raises(UnevenSplitError, match=message):
        split_matrices(Llama(replace(tiny_shape, **changes)), Mesh)  # type: ignore[arg-type]
