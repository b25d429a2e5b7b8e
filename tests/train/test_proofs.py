"""Before a fine-tuning takes a step it is proved that it would train what it says it trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gristmill.train.objectives.preflight_checks import CERTIFICATE, NotProvedError, failures
from gristmill.train.objectives.sft_objective import AssistantTurns

GOOD = {
    "loss": 2.0,
    "loss_unpacked": 2.0,
    "accumulation_difference": 0.0,
    "largest_difference": 1e-4,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loss": 2.001}, "packed rows have the loss 2.001000, but their examples one by one 2.000000"),
        ({"loss": float("nan")}, "packed rows have the loss nan"),
        ({"accumulation_difference": 2e-4}, r"big batch by 2.00e-04 of their norm \(tolerance 0.0001\)"),
    ],
)
def test_each_thing_that_does_not_hold_is_said(change: Any, reason: str) -> None:
    assert failures(GOOD) == []
    (problem,) = failures({**GOOD, **change})
    assert re.search(reason, problem)


@pytest.fixture
def start(run_stage: Any, tokenizer_folder: Path, mix_folder: Path, pretrain_config: Any, tmp_path: Path) -> Any:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage("pretrain", inputs, {**pretrain_config, "steps": 4}, tmp_path / "pretrain")
    path = tmp_path / "sft.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"q {word}", "completion": f"The {word}, and so on."}) + "\n"
            for word in ("json", "text", "file", "name", "list", "code", "line", "type")
        )
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


def test_the_certificate_is_kept_beside_the_model_and_not_made_again(
    run_stage: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, config = start
    summary = run_stage("sft", inputs, config, tmp_path / "sft")
    found = json.loads((tmp_path / "sft" / "data" / CERTIFICATE).read_text())
    assert found == summary["step_0"]
    assert found["loss"] == pytest.approx(found["loss_unpacked"], rel=1e-5)
    assert found["accumulation_difference"] < 1e-5
    assert (found["end_of_turn_share"], found["problems"]) == (1.0, [])
    monkeypatch.setattr("gristmill.train.objectives.preflight_checks.packed_and_unpacked", None)
    assert run_stage("sft", inputs, config, tmp_path / "sft")["step_0"] == found


def test_attention_that_crosses_between_examples_is_found_out(
    run_stage: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, config = start
    monkeypatch.setattr(
        "gristmill.train.models.decoder.see_documents", lambda positions, dense=False, prefix=None: None
    )
    with pytest.raises(NotProvedError, match="attention or positions cross from one example into another"):
        run_stage("sft", inputs, config, tmp_path / "sft")
    assert not (tmp_path / "sft" / "work" / CERTIFICATE).exists()


def test_means_over_micro_batches_are_found_out(
    run_stage: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, config = start
    summed = AssistantTurns.loss

    def mean(self: AssistantTurns, model: Any, batch: Any, scale: Any, draw: Any = None) -> Any:
        found = summed(self, model, batch, scale, draw)
        return found._replace(loss=found.loss / batch.trained.sum())

    monkeypatch.setattr(AssistantTurns, "loss", mean)
    with pytest.raises(NotProvedError, match="gradients of micro-batches differ from those of one big batch"):
        run_stage("sft", inputs, config, tmp_path / "sft")


def test_a_gate_may_be_lowered(run_stage: Any, start: Any, tmp_path: Path) -> None:
    inputs, config = start
    config = {**config, "sequence_length": 16, "gates": {"min_end_of_turn_trained": 0.0}}
    assert run_stage("sft", inputs, config, tmp_path / "sft")["step_0"]["end_of_turn_share"] == 0.0
