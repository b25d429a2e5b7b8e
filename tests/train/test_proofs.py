"""Checks that must pass before fine-tuning starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gristmill.train.objectives.preflight_checks import (
    CERTIFICATE,
    NotProvedError,
    failures,
)
from gristmill.train.objectives.sft import AssistantTurns
from tests.jsonl import write_jsonl

GOOD = {
    "loss": 2.0,
    "loss_unpacked": 2.0,
    "accumulation_difference": 0.0,
    "largest_difference": 1e-4,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loss": 2.001}, r"2\.001000.* 2\.000000"),
        ({"loss": float("nan")}, r"\bnan\b"),
        ({"accumulation_difference": 2e-4}, r"2\.00e-04 .*0\.0001"),
    ],
)
def test_each_failed_check_is_reported(change: Any, reason: str) -> None:
    assert failures(GOOD) == []
    (problem,) = failures({**GOOD, **change})
    assert re.search(reason, problem)


@pytest.fixture
def start(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: Any,
    tmp_path: Path,
) -> Any:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage(
        "pretrain", inputs, {**pretrain_config, "steps": 4}, tmp_path / "pretrain"
    )
    path = tmp_path / "sft.jsonl"
    write_jsonl(
        path,
        [
            {"prompt": f"q {word}", "completion": f"The {word}, and so on."}
            for word in ("json", "text", "file", "name", "list", "code", "line", "type")
        ],
    )
    config = {
        "data": [{"path": str(path)}],
        "steps": 1,
        "global_batch_size": 2,
        "micro_batch_size": 3,
        "seed": 1,
        "sequence_length": 64,
    }
    return {**inputs, "pretrain": tmp_path / "pretrain" / "data"}, config


@pytest.mark.slow
def test_certificate_is_saved_beside_the_model_and_reused(
    run_stage: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, config = start
    summary = run_stage("sft", inputs, config, tmp_path / "sft")
    certificate = json.loads((tmp_path / "sft" / "data" / CERTIFICATE).read_text())
    assert certificate == summary["step_0"]
    assert certificate["loss"] == pytest.approx(certificate["loss_unpacked"], rel=1e-5)
    assert certificate["accumulation_difference"] < 1e-5
    monkeypatch.setattr("gristmill.train.objectives.preflight_checks.gradients", None)
    assert run_stage("sft", inputs, config, tmp_path / "sft")["step_0"] == certificate


def test_attention_across_examples_is_detected(
    run_stage: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, config = start
    monkeypatch.setattr(
        "gristmill.train.models.transformer.see_documents",
        lambda positions, dense=False, prefix=None: None,
    )
    with pytest.raises(NotProvedError, match="attention or positions"):
        run_stage("sft", inputs, config, tmp_path / "sft")
    assert not (tmp_path / "sft" / "work" / CERTIFICATE).exists()


def test_means_over_micro_batches_are_detected(
    run_stage: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, config = start
    summed = AssistantTurns.loss

    def mean(self: AssistantTurns, model: Any, batch: Any, scale: Any) -> Any:
        result = summed(self, model, batch, scale)
        return result._replace(loss=result.loss / batch.trained.sum())

    monkeypatch.setattr(AssistantTurns, "loss", mean)
    with pytest.raises(NotProvedError, match="micro-batches"):
        run_stage("sft", inputs, config, tmp_path / "sft")
