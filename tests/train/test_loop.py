"""A whole training beyond forward, backward and update: bad steps, averages,
measurements, early stopping.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gristmill.core.stage_context import Context
from gristmill.tokenize.packed import PackedSet
from gristmill.train import trainer
from gristmill.train.loop import step, throughput
from gristmill.train.loop.batch_plan import RowPlan
from gristmill.train.loop.metrics_log import TIMINGS
from gristmill.train.loop.stopping import held_out_loss, no_longer_improves
from gristmill.train.stages import export
from tests.jsonl import read_jsonl, read_metrics
from tests.train.trained import assert_same_output, weights_of


def read_lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = read_jsonl(folder / "data" / name)
    return [
        {key: value for key, value in line.items() if key not in TIMINGS}
        for line in lines
    ]


# Bad steps


@pytest.fixture
def poisoned(
    monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Path]
) -> Callable[[], list[tuple[int, ...]]]:
    """Make the loss of the first batches of steps 21 to 23 NaN; the value returns all
    batches read.
    """
    packed, plan = PackedSet(inputs["mix"]), RowPlan(((0, 0, 4),))
    bad = {tuple(plan.rows(packed.order(11), step - 1)) for step in (21, 22, 23)}
    one_step, accumulate_gradients = trainer.one_step, step.accumulate_gradients
    read: list[tuple[int, ...]] = []

    def recorded_step(attempt: Any, batch: Any, batches: Any) -> Any:
        read.append(tuple(batch.rows))
        return one_step(attempt, batch, batches)

    def poisoned_gradients(*arguments: Any) -> Any:
        sums, row_losses = accumulate_gradients(*arguments)
        return sums * (math.nan if read[-1] in bad else 1.0), row_losses

    monkeypatch.setattr(trainer, "one_step", recorded_step)
    monkeypatch.setattr(step, "accumulate_gradients", poisoned_gradients)
    return lambda: read


@pytest.mark.slow
@pytest.mark.parametrize(("last_step", "checkpoint"), [(24, 20), (27, 25)])
def test_training_killed_after_bad_steps_resumes_exactly(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
    poisoned: Any,
    monkeypatch: pytest.MonkeyPatch,
    last_step: int,
    checkpoint: int,
) -> None:
    """Steps 21 to 23 are bad; a kill after step 24 loses them, one after step 27 does
    not.
    """
    config = {**pretrain_config, "steps": 30, "global_batch_size": 4}
    summary = run_stage("pretrain", inputs, config, tmp_path / "undisturbed")
    assert summary["skipped_steps"] == 3
    undisturbed = len(poisoned())
    with monkeypatch.context() as patch:
        patch.setattr(
            trainer,
            "_collect_where_due",
            lambda step: _raise_interrupt() if step == last_step else None,
        )
        with pytest.raises(KeyboardInterrupt):
            run_stage(
                "pretrain", inputs, config, tmp_path / "killed", checkpoint_every=5
            )
    torch.distributed.destroy_process_group()
    resumed = run_stage(
        "pretrain", inputs, config, tmp_path / "killed", checkpoint_every=5
    )
    assert resumed["skipped_steps"] == 3
    assert len(poisoned()) == undisturbed + last_step + 30 - checkpoint
    assert_same_output(tmp_path / "killed", tmp_path / "undisturbed")
    assert read_lines(tmp_path / "killed") == read_lines(tmp_path / "undisturbed")
    skipped = read_lines(tmp_path / "killed", "skipped_steps.jsonl")
    assert [line["step"] for line in skipped] == [21, 22, 23]
    assert skipped == read_lines(tmp_path / "undisturbed", "skipped_steps.jsonl")
    assert sorted(
        path.name for path in (tmp_path / "killed" / "data" / "autopsies").iterdir()
    ) == ["exclude.txt", *(f"step-{step}.json" for step in (21, 22, 23))]


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_resumed_training_logs_throughput_and_a_stop_reports_its_step(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Steps 1, 3, 6, 9 and 12 are logged; the first attempt stops after step 1, the
    second after step 2.
    """
    config, events = {**pretrain_config, "log_every": 3}, list[dict[str, Any]]()
    with monkeypatch.context() as patch:
        patch.setattr(step, "stop_requested", lambda: True)
        for step_reached in (1, 2):
            with pytest.raises(
                trainer.StoppedError, match=f"after step {step_reached}"
            ):
                run_stage("pretrain", inputs, config, tmp_path, emit=events.append)
            torch.distributed.destroy_process_group()
            assert [event["done"] for event in events if event["event"] == "progress"][
                -1
            ] == step_reached
    run_stage("pretrain", inputs, config, tmp_path)
    lines = read_metrics(tmp_path)
    logged = [line for line in lines if "grad_norm" in line]
    assert [line["step"] for line in logged] == [1, 3, 6, 9, 12]
    assert all(line["tokens_per_second"] > 0 for line in logged)
    printed = capsys.readouterr().out
    assert all(
        f"step {line['step']}: loss {line['loss']:.4g}, " in printed for line in logged
    )


def test_clock_excludes_the_first_step_unless_it_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now)
    cold = throughput.Clock(1000, 10)
    now = 50.0
    assert cold.rate(1100) == 2.0
    warm = throughput.Clock(1000, 10)
    now = 90.0
    warm.skip_first_step(1100, 11, 0.0)
    now = 95.0
    warm.skip_first_step(1200, 12, 0.0)
    now = 100.0
    assert warm.rate(1300) == 20.0


# Kinds of updates, precision, averages


@pytest.mark.parametrize(
    "kind",
    [
        "muon",
        "adafactor",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lion", "adamw8bit")),
    ],
)
def test_every_optimizer_trains_and_resumes_to_the_same_bits(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
    stop_pretraining: Any,
    kind: str,
) -> None:
    if kind == "adamw8bit":
        pytest.importorskip("torchao")
    rate = {"lion": 0.002, "adafactor": 0.05}.get(kind, 0.01)
    config = {
        **pretrain_config,
        "optimizer": {"kind": kind, "learning_rate": rate},
    }
    run_stage("pretrain", inputs, config, tmp_path / "whole")
    stop_pretraining(inputs, config, tmp_path / "cut")
    run_stage("pretrain", inputs, config, tmp_path / "cut")
    steps = [line for line in read_lines(tmp_path / "whole") if "loss" in line]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.15
    assert read_lines(tmp_path / "cut") == read_lines(tmp_path / "whole")
    assert_same_output(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_average_is_validated_saved_and_exported(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {
        **pretrain_config,
        "average": {"kind": "swa", "start_fraction": 0.8},
        "validate_every": 1,
        "schedule": {"kind": "constant"},
    }
    summary = run_stage("pretrain", inputs, config, tmp_path)
    assert set(summary["validation_average"]) == {"prose", "code"}
    raw, mean = weights_of(tmp_path), weights_of(tmp_path, "model-average")
    assert any(not torch.equal(raw[name], mean[name]) for name in raw)
    validations = [line for line in read_lines(tmp_path) if "validation" in line]
    # averaging starts after step 10
    assert validations[9]["validation"] == validations[9]["validation_average"]
    assert validations[11]["validation"] != validations[11]["validation_average"]
    for weights, name in (("raw", "model"), ("average", "model-average")):
        out = tmp_path / weights
        export.run(
            {"tokenizer": inputs["tokenizer"], "pretrain": tmp_path / "data"},
            {"weights": weights},
            out,
            Context(tmp_path),
        )
        exported = load_file(out / "model.safetensors")
        assert torch.equal(
            exported["model.norm.weight"],
            weights_of(tmp_path, name)["model.norm.weight"],
        )


def test_export_of_a_missing_average_is_rejected_with_the_setting(
    tmp_path: Path,
) -> None:
    from gristmill.mixtures.schema.evaluation import Export

    with pytest.raises(ValueError, match=r"sft\.average"):
        export.weights_folder(tmp_path, "sft", Export(weights="average"))


# Measurements


@pytest.mark.slow
def test_norms_update_ratio_and_memory_are_logged(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {
        **pretrain_config,
        "steps": 4,
        "micro_batch_size": 2,
        "log_every": 2,
        "schedule": {"kind": "constant", "warmup_steps": 0},
    }
    run_stage("pretrain", inputs, config, tmp_path)
    lines = read_metrics(tmp_path)
    *_, fourth = (line for line in lines if "grad_norm" in line)
    norm = math.sqrt(
        sum(
            float(tensor.double().square().sum())
            for tensor in weights_of(tmp_path).values()
        )
    )
    assert fourth["param_norm"] == pytest.approx(norm, rel=1e-5)
    assert 0.001 < fourth["update_ratio"] < 0.2
    assert fourth["peak_memory_bytes"] > 50_000_000
    # unknown peak of a CPU
    assert (fourth["mfu"], fourth["mfu_causal"]) == ("unknown", "unknown")


# Early stopping


@pytest.mark.slow
def test_training_ends_when_validation_stops_improving(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """No loss improves by a hundred nats: two validations after the first end the
    training.
    """
    config = {
        **pretrain_config,
        "validate_every": 2,
        "early_stopping": {"patience": 2, "min_delta": 100.0},
    }
    summary = run_stage("pretrain", inputs, config, tmp_path)
    assert (summary["steps"], summary["stopped_early"]) == (6, True)


def test_only_a_better_loss_resets_patience() -> None:
    assert no_longer_improves(None, 0, 3.0, 0.1) == (3.0, 0)
    assert no_longer_improves(3.0, 1, 2.95, 0.1) == (3.0, 2)
    assert no_longer_improves(3.0, 1, 2.85, 0.1) == (2.85, 0)
    assert no_longer_improves(None, 0, math.nan, 0.1) == (None, 1)
    assert (
        held_out_loss(
            {
                "validation": {
                    "a": {"loss": 1.0, "tokens": 3},
                    "b": {"loss": 5.0, "tokens": 1},
                }
            }
        )
        == 2.0
    )
    assert held_out_loss({}) is None


@pytest.mark.slow
def test_training_does_not_touch_global_random_generators(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """A checkpoint then needs no state of them."""
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    run_stage(
        "pretrain",
        inputs,
        {**pretrain_config, "steps": 2},
        tmp_path,
    )
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("warmup", "is_warned"),
    [
        ({}, False),
        ({"warmup_steps": 6}, False),
        ({"warmup_steps": 9}, True),
    ],
)
def test_long_warm_up_is_warned_about(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
    warmup: dict[str, int],
    is_warned: bool,
) -> None:
    messages: list[str] = []
    config = {**pretrain_config, "schedule": warmup}
    run_stage(
        "pretrain",
        inputs,
        config,
        tmp_path,
        emit=lambda event: messages.append(event.get("message", "")),
    )
    assert any("learning rate rises" in message for message in messages) == is_warned
