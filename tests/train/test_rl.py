"""Reinforcement learning of a tiny model: what it learns, what it writes down, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORDS = ("json", "text", "file", "name", "list", "code", "line", "type", "value", "error", "module", "class")
TIMINGS = ("tokens_per_second", "mfu", "mfu_causal", "data_wait_seconds", "data_wait_share", "peak_memory_bytes",
           "rollout_tokens_per_second")


@pytest.fixture
def start(
    run_stage: Any, tokenizer_folder: Path, mix_folder: Path, pretrain_config: dict[str, Any], tmp_path: Path
) -> dict[str, Path]:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage("pretrain", inputs, {**pretrain_config, "steps": 2}, tmp_path / "pretrain")
    return {**inputs, "pretrain": tmp_path / "pretrain" / "data"}


@pytest.fixture
def rl_config(tmp_path: Path) -> dict[str, Any]:
    """Answer with an "e", briefly."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": word, "answer": word}) + "\n" for word in WORDS))
    return {"data": [{"path": str(path)}], "rewards": [{"kind": "contains", "text": "e"}], "group_size": 8,
            "global_batch_size": 32, "micro_batch_size": 32, "max_new_tokens": 6, "steps": 12, "log_every": 1,
            "seed": 5, "kl_weight": 0.01, "holdout": 0.2, "samples_every": 6, "sequence_length": 32,
            "optimizer": {"learning_rate": 0.01}}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data" / "metrics.jsonl").read_text().splitlines()]


def test_the_policy_learns_what_is_rewarded(
    run_stage: Any, start: dict[str, Path], rl_config: dict[str, Any], tmp_path: Path
) -> None:
    summary = run_stage("rl", start, rl_config, tmp_path / "rl")
    lines = metrics(tmp_path / "rl")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert summary["held_out"]["reward"] > summary["held_out"]["reward_before"]
