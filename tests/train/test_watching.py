"""Trackers (Weights & Biases as a fake, MLflow), profiler and strict
determinism.
"""

from __future__ import annotations

import gzip
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import (
    Mlflow,
    Profile,
    Trackers,
    TrainingEngine,
    Wandb,
)
from gristmill.train.loop.metrics_log import Record
from gristmill.train.loop.throughput import Profiler
from gristmill.train.stages import pretrain
from tests.jsonl import read_metrics
from tests.packed_sets import write_packed_set


class FakeRun:
    """Records the calls of a run of Weights & Biases."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.lines, self.axes, self.finished = settings, [], [], False

    def log(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def finish(self) -> None:
        self.finished = True


def test_wandb_receives_every_line_with_its_training_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        runs.append(FakeRun(**settings))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for step in (0, 3):  # the second attempt resumes
        record = Record(
            tmp_path,
            step,
            trackers=Trackers(wandb=Wandb(project="mill", mode="offline")),
        )
        record.metrics(
            step + 1,
            {"loss": 2.0, "sources": {"a": {"loss": 1.0}}, "mfu": "unknown"},
        )
        record.close()
    first_run, second_run = runs
    assert first_run.lines == [{"training_step": 1, "loss": 2.0, "sources/a/loss": 1.0}]
    assert second_run.lines[0]["training_step"] == 4
    assert first_run.axes == [("training_step", None), ("*", "training_step")]
    # one run for all attempts, by its id
    assert first_run.settings == second_run.settings
    assert (
        first_run.settings["project"],
        first_run.settings["mode"],
        first_run.settings["resume"],
    ) == (
        "mill",
        "offline",
        "allow",
    )
    assert first_run.finished


def test_missing_wandb_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gristmill\[wandb\]'"):
        Record(tmp_path, 0, trackers=Trackers(wandb=Wandb(project="mill")))


LINES = [
    {"step": 1, "loss": 2.0, "sources": {"a": {"loss": 1.0}}, "mfu": "unknown"},
    {"step": 2, "loss": 1.5},
]


def test_missing_client_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("mlflow", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, module, None)
    section = Mlflow(tracking_uri="sqlite://", experiment="mill")
    with pytest.raises(
        ModuleNotFoundError,
        match=r"engine\.mlflow .*pip install 'gristmill\[mlflow\]'",
    ):
        Record(tmp_path, 0, trackers=Trackers(mlflow=section))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_has_one_run_of_all_attempts_with_training_steps(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    section = Mlflow(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="mill", name="first"
    )
    for work, resumed in (("a", 0), ("a", 1), ("b", 0)):
        (tmp_path / work).mkdir(exist_ok=True)
        record = Record(tmp_path / work, resumed, trackers=Trackers(mlflow=section))
        for line in LINES[resumed:]:
            record.metrics(line["step"], line)
        record.close()
    client = MlflowClient(section.tracking_uri)
    experiment = client.get_experiment_by_name("mill")
    assert experiment is not None
    runs = client.search_runs(
        [experiment.experiment_id], order_by=["attributes.start_time"]
    )
    # one for each working folder
    assert [run.info.run_name for run in runs] == ["first", "first"]
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    run_id = runs[0].info.run_id
    # The second attempt logged step 2 again.
    assert [
        (point.step, point.value) for point in client.get_metric_history(run_id, "loss")
    ] == [
        (1, 2.0),
        (2, 1.5),
        (2, 1.5),
    ]
    assert [
        (point.step, point.value)
        for point in client.get_metric_history(run_id, "sources/a/loss")
    ] == [(1, 1.0)]
    assert client.get_metric_history(run_id, "mfu") == []


GOLDEN_LOSSES = {
    "adamw": [
        4.618500,
        4.575718,
        4.432199,
        4.337251,
        4.152055,
        3.933020,
        3.768168,
        3.605619,
        3.469254,
        3.432973,
    ],
    "adafactor": [
        4.618500,
        4.618234,
        4.616282,
        4.598632,
        4.622217,
        4.606116,
        4.584247,
        4.607949,
        4.587538,
        4.607058,
    ],
}
"""Losses of the training below in float32 on a CPU."""


@pytest.fixture(scope="module")
def synthetic(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path
) -> dict[str, Path]:
    """Rows of counting numbers with a stride per row; no loss depends on the
    machine.
    """
    folder = tmp_path_factory.mktemp("synthetic")
    rows = (
        np.arange(40)[:, None] * 7
        + np.arange(24)[None, :] * (1 + np.arange(40)[:, None] % 5)
    ) % 96 + 4
    write_packed_set(
        folder / "mix",
        rows,
        {"all": 40},
        {"vocab_size": 100, "eos": 0, "pad": 1, "sha256": ""},
        {"all": rows[:4]},
    )
    return {"mix": folder / "mix", "tokenizer": tokenizer_folder}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GOLDEN_LOSSES)
def test_losses_equal_recorded_ones(
    one_process: None, synthetic: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    config = {
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48},
        "steps": 10,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "seed": 3,
        "log_every": 1,
        "precision": "fp32",
        "schedule": {"warmup_steps": 2},
        "optimizer": {"kind": kind, "learning_rate": 0.01},
    }
    context = Context(
        tmp_path / "work",
        training=TrainingEngine(
            deterministic=True, profile=Profile(first_step=2, steps=2, memory=True)
        ),
        emit=lambda event: None,
    )
    context.work.mkdir()
    pretrain.run(synthetic, config, tmp_path / "data", context)
    lines = read_metrics(tmp_path)
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(
        GOLDEN_LOSSES[kind], rel=5e-5
    )
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    trace = json.loads(
        gzip.decompress((context.work / "profile" / "rank-0.json.gz").read_bytes())
    )
    steps = sum(
        event.get("name") == "_Differentiated" for event in trace["traceEvents"]
    )
    assert steps == 2 * 2  # two steps of two micro-batches


def test_training_resumed_after_the_profiled_steps_is_not_profiled(
    tmp_path: Path,
) -> None:
    profiler = Profiler(Profile(first_step=2), Context(tmp_path), None, 5)  # type: ignore[arg-type]
    profiler.after(6)
    profiler.close()
    assert not (tmp_path / "profile").exists()
