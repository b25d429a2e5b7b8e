"""Adapters on a model that is held rounded, wherever a stage tunes one; bitsandbytes' bits are test_lora's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gristmill.mixtures.model import Model
from gristmill.train.adapters.quantised import rounded
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import save_model
from gristmill.train.objectives.reference_logps import KEY, StaleReferenceError

WORDS = ("json", "text", "file", "name", "list", "code")
LORA = {"rank": 4, "alpha": 8, "base": "int8", "targets": ["v_proj", "up_proj"]}
ROUNDED = {"base": "int8", "targets": ["v_proj", "up_proj"]}
TRAINING = {
    "seed": 11,
    "log_every": 1,
    "steps": 6,
    "global_batch_size": 4,
    "micro_batch_size": 4,
    "optimizer": {"learning_rate": 0.02},
    "schedule": {"warmup_steps": 1, "kind": "constant"},
}


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_folder: Path,
    mix_folder: Path,
    make_model: Callable[[Shape], Llama],
) -> dict[str, Path]:
    """What the stages read; the model has matrices that int8 cannot hold without a loss that shows."""
    section = Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48)
    model = make_model(shape_of(section, Chat(tokenizer_folder).tokenizer.get_vocab_size(), 64))
    folder = tmp_path_factory.mktemp("start")
    with torch.no_grad():
        for name, matrix in model.named_parameters():
            if "v_proj" in name or "up_proj" in name:
                matrix[:, 0] *= 40.0
    save_model(folder / "model", model.shape, dict(model.state_dict()))
    return {"tokenizer": tokenizer_folder, "mix": mix_folder, "pretrain": folder}


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "pairs.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "prompt": [{"role": "user", "content": f"What is a {word}? {n}"}],
                    "chosen": [{"role": "assistant", "content": f"A {word}."}],
                    "rejected": [{"role": "assistant", "content": "I do not know."}],
                }
            )
            + "\n"
            for word in WORDS
            for n in range(3)
        )
    )
    return {"data": [{"path": str(tmp_path / "pairs.jsonl")}], "sequence_length": 64}


def check_what_it_learned_on(start: dict[str, Path], folder: Path, summary: dict[str, Any]) -> None:
    """The named matrices are what the rounded ones stand for, and what adapters added; the others are as before."""
    before, after = (load_file(path / "model" / "model.safetensors") for path in (start["pretrain"], folder))
    for name in before.keys() & after.keys():
        if "v_proj" not in name and "up_proj" not in name:
            assert torch.equal(before[name][: len(after[name])], after[name]), name  # a reward model has no padding ids
            continue
        stands_for = rounded(before[name], "int8").whole(torch.float32)
        assert not torch.equal(stands_for, before[name])
        added = after[name] - stands_for
        assert 0 < torch.linalg.matrix_rank(added, rtol=1e-4) <= 4, name
    # Of each layer one (16, 32) and one (48, 32) matrix.
    assert summary["lora_base"]["kind"] == "int8"
    assert summary["lora_base"]["float32_bytes"] == 4 * 2 * (16 + 48) * 32
    assert summary["lora_base"]["bytes"] == 2 * (16 + 48) * (32 + 4)


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_preferences_start_from_a_reference_that_is_rounded_alike(
    loss: str, run_stage: Any, start: dict[str, Path], pairs: dict[str, Any], tmp_path: Path
) -> None:
    config = {**TRAINING, **pairs, "loss": loss, "holdout": 0.2, "lora": LORA}
    asked = {**pairs, "micro_batch_size": 4, "answers": loss == "kto"}
    told = run_stage("reference", start, {**asked, "rounded": ROUNDED}, tmp_path / "reference")
    assert told["key"]["rounding"] == "int8 in up_proj, v_proj"
    inputs = {**start, "reference": tmp_path / "reference" / "data"}
    summary = run_stage("dpo", inputs, config, tmp_path / "dpo")
    assert summary["step_0"]["margin" if loss == "sigmoid" else "largest_reward"] == pytest.approx(0.0, abs=1e-4)
    assert summary["last_loss"] < summary["first_loss"]
    check_what_it_learned_on(start, tmp_path / "dpo" / "data", summary)

    run_stage("reference", start, asked, tmp_path / "whole")
    inputs["reference"] = tmp_path / "whole" / "data"
    with pytest.raises(StaleReferenceError, match=r"rounding was None and is int8 in up_proj, v_proj\."):
        run_stage("dpo", inputs, config, tmp_path / "stale")
    assert json.loads((inputs["reference"] / KEY).read_text())["rounding"] is None


def test_a_scoring_row_and_adapters_learn_on_a_rounded_model(
    run_stage: Any, start: dict[str, Path], pairs: dict[str, Any], tmp_path: Path
) -> None:
    summary = run_stage("reward", start, {**TRAINING, **pairs, "holdout": 0.2, "lora": LORA}, tmp_path / "reward")
    assert summary["last_loss"] < summary["first_loss"]
    check_what_it_learned_on(start, tmp_path / "reward" / "data", summary)


def test_a_policy_is_rounded_where_it_answers_and_where_it_learns(
    run_stage: Any, start: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in WORDS))
    config = {
        **TRAINING,
        "data": [{"path": str(tmp_path / "prompts.jsonl")}],
        "holdout": 0.3,
        "kl_weight": 0.1,
        "rewards": [{"kind": "contains", "text": "e"}, {"kind": "length", "target_tokens": 2}],
        "group_size": 4,
        "max_new_tokens": 4,
        "lora": LORA,
    }
    summary = run_stage("rl", start, config, tmp_path / "rl")
    lines = [json.loads(line) for line in (tmp_path / "rl/data/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["kl"] == 0.0 < lines[-1]["kl"]
    check_what_it_learned_on(start, tmp_path / "rl" / "data", summary)
    # What answers is what the stage leaves: both are asked the same, at the temperature 0.
    again = run_stage(
        "rl",
        {**start, "pretrain": tmp_path / "rl" / "data"},
        {**config, "steps": 1, "lora": None, "optimizer": {"learning_rate": 1e-9}},
        tmp_path / "again",
    )
    assert [one["before"] for one in again["samples"]] == [one["after"] for one in summary["samples"]]
