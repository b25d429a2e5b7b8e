"""Adapters on a quantised model in every stage that trains them; test_lora.py covers
bitsandbytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gristmill.mixtures.schema.model import Model
from gristmill.train.adapters.quantised import rounded
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import save_model
from gristmill.train.objectives.reference_logps import KEY, StaleReferenceError
from tests.jsonl import read_metrics, write_jsonl

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
    """Inputs of the stages, with matrices that int8 rounds noticeably."""
    section = Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48)
    model = make_model(
        shape_of(section, Chat(tokenizer_folder).tokenizer.get_vocab_size(), 64)
    )
    folder = tmp_path_factory.mktemp("start")
    with torch.no_grad():
        for name, matrix in model.named_parameters():
            if "v_proj" in name or "up_proj" in name:
                matrix[:, 0] *= 40.0
    save_model(folder / "model", model.shape, dict(model.state_dict()))
    return {"tokenizer": tokenizer_folder, "mix": mix_folder, "pretrain": folder}


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, Any]:
    write_jsonl(
        tmp_path / "pairs.jsonl",
        [
            {
                "prompt": [{"role": "user", "content": f"What is a {word}? {n}"}],
                "chosen": [{"role": "assistant", "content": f"A {word}."}],
                "rejected": [{"role": "assistant", "content": "I do not know."}],
            }
            for word in WORDS
            for n in range(3)
        ],
    )
    return {"data": [{"path": str(tmp_path / "pairs.jsonl")}], "sequence_length": 64}


def check_merged_weights(
    start: dict[str, Path], folder: Path, summary: dict[str, Any]
) -> None:
    """Check that target matrices are the dequantised ones plus adapters, and that
    others are unchanged.
    """
    before, after = (
        load_file(path / "model" / "model.safetensors")
        for path in (start["pretrain"], folder)
    )
    for name in before.keys() & after.keys():
        if "v_proj" not in name and "up_proj" not in name:
            # a reward model has no padding ids
            assert torch.equal(before[name][: len(after[name])], after[name]), name
            continue
        restored = rounded(before[name], "int8").whole(torch.float32)
        assert not torch.equal(restored, before[name])
        added = after[name] - restored
        assert 0 < torch.linalg.matrix_rank(added, rtol=1e-4) <= 4, name
    # Each layer has a (16, 32) and a (48, 32) matrix.
    assert summary["lora_base"]["kind"] == "int8"
    assert summary["lora_base"]["float32_bytes"] == 4 * 2 * (16 + 48) * 32
    assert summary["lora_base"]["bytes"] == 2 * (16 + 48) * (32 + 4)


@pytest.mark.slow
def test_dpo_needs_a_reference_with_the_same_quantisation(
    run_stage: Any, start: dict[str, Path], pairs: dict[str, Any], tmp_path: Path
) -> None:
    config = {**TRAINING, **pairs, "holdout": 0.2, "lora": LORA}
    reference_config = {**pairs, "micro_batch_size": 4}
    reference = run_stage(
        "reference",
        start,
        {**reference_config, "rounded": ROUNDED},
        tmp_path / "reference",
    )
    assert reference["key"]["rounding"] == "int8 in up_proj, v_proj"
    inputs = {**start, "reference": tmp_path / "reference" / "data"}
    summary = run_stage("dpo", inputs, config, tmp_path / "dpo")
    assert summary["step_0"]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert summary["last_loss"] < summary["first_loss"]
    check_merged_weights(start, tmp_path / "dpo" / "data", summary)

    run_stage("reference", start, reference_config, tmp_path / "whole")
    inputs["reference"] = tmp_path / "whole" / "data"
    with pytest.raises(
        StaleReferenceError, match=r"rounding .*None .*int8 in up_proj, v_proj"
    ):
        run_stage("dpo", inputs, config, tmp_path / "stale")
    assert json.loads((inputs["reference"] / KEY).read_text())["rounding"] is None


@pytest.mark.slow
def test_reward_model_trains_on_a_quantised_base(
    run_stage: Any, start: dict[str, Path], pairs: dict[str, Any], tmp_path: Path
) -> None:
    summary = run_stage(
        "reward",
        start,
        {**TRAINING, **pairs, "holdout": 0.2, "lora": LORA},
        tmp_path / "reward",
    )
    assert summary["last_loss"] < summary["first_loss"]
    check_merged_weights(start, tmp_path / "reward" / "data", summary)


@pytest.mark.slow
def test_policy_is_quantised_for_generation_and_training(
    run_stage: Any, start: dict[str, Path], tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": word} for word in WORDS])
    config = {
        **TRAINING,
        "data": [{"path": str(tmp_path / "prompts.jsonl")}],
        "holdout": 0.3,
        "kl_weight": 0.1,
        "rewards": [
            {"kind": "contains", "text": "e"},
            {"kind": "length", "target_tokens": 2},
        ],
        "group_size": 4,
        "max_new_tokens": 4,
        "lora": LORA,
    }
    summary = run_stage("rl", start, config, tmp_path / "rl")
    lines = read_metrics(tmp_path / "rl")
    assert lines[0]["kl"] == 0.0 < lines[-1]["kl"]
    check_merged_weights(start, tmp_path / "rl" / "data", summary)
    # The saved model gives the answers of the policy, at temperature 0.
    again = run_stage(
        "rl",
        {**start, "pretrain": tmp_path / "rl" / "data"},
        {**config, "steps": 1, "lora": None, "optimizer": {"learning_rate": 1e-9}},
        tmp_path / "again",
    )
    assert [sample["before"] for sample in again["samples"]] == [
        sample["after"] for sample in summary["samples"]
    ]
