"""Reward models: loss by hand, scored positions, and training results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from gristmill.train.data.conversation_tokens import Chat, NothingToTrainError
from gristmill.train.eval.intervals import share_with_interval
from gristmill.train.models.model_config import Shape
from gristmill.train.models.reward_model import last_tokens, load_reward_model, scores
from gristmill.train.models.weights import WeightsError, load_model
from gristmill.train.objectives.reward_pairs import reward_loss
from gristmill.train.stages.reward import scoring_flops_per_token
from tests.jsonl import read_jsonl, read_metrics, write_jsonl

WORDS = (
    "json",
    "text",
    "file",
    "name",
    "list",
    "code",
    "line",
    "type",
    "value",
    "error",
    "module",
    "class",
)


@pytest.mark.parametrize(
    ("margin", "center_weight", "expected"),
    [
        (0.0, 0.0, 0.2014132780),  # ln(1 + e^-1.5)
        (0.5, 0.0, 0.3132616875),  # ln(1 + e^-1)
        (0.0, 0.01, 0.2039132780),  # + 0.01 (1.0 - 0.5)^2
    ],
)
def test_reward_loss_is_derived_by_hand(
    margin: float, center_weight: float, expected: float
) -> None:
    losses = reward_loss(
        torch.tensor([1.0]), torch.tensor([-0.5]), margin, center_weight
    )
    assert losses.tolist() == [pytest.approx(expected, abs=1e-7)]


def test_row_is_scored_at_its_last_unpadded_token() -> None:
    ids = torch.tensor([[5, 9, 7, 9], [9, 9, 9, 9], [5, 6, 7, 8]])
    assert last_tokens(ids, 9).tolist() == [2, 0, 3]


def test_wilson_interval_has_a_width_if_every_pair_is_correct() -> None:
    interval = share_with_interval(np.ones(16, dtype=bool))
    assert interval == {
        "value": 1.0,
        "low": pytest.approx(16 / (16 + 1.959964**2)),
        "high": 1.0,
        "units": 16,
    }
    half = share_with_interval(np.array([True, False] * 50))
    assert half is not None
    assert (half["low"], half["high"]) == (
        pytest.approx(0.4038315),
        pytest.approx(0.5961685),
    )
    assert share_with_interval(np.ones(0, dtype=bool)) is None


def test_scoring_flops_exclude_the_vocabulary(tiny_shape: Shape) -> None:
    """Six operations per weight except the 100 x 32 output, plus attention."""
    weights = (
        tiny_shape.matrix_parameters - tiny_shape.padded_vocab_size * tiny_shape.width
    )
    attention = 12 * tiny_shape.layers * tiny_shape.attention_width * 24
    assert scoring_flops_per_token(tiny_shape, 24, None) == 6 * weights + attention


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, make_model: Any
) -> dict[str, Path]:
    """A tuned model with initial weights, as later stages read one."""
    from gristmill.mixtures.schema.model import Model
    from gristmill.train.models.model_config import shape_of
    from gristmill.train.models.weights import save_model

    section = Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48)
    model = make_model(
        shape_of(
            section,
            vocab_size=Chat(tokenizer_folder).tokenizer.get_vocab_size(),
            sequence_length=64,
        )
    )
    folder = tmp_path_factory.mktemp("sft")
    save_model(folder / "model", model.shape, dict(model.state_dict()))
    return {"tokenizer": tokenizer_folder, "sft": folder}


def config_with(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Write 36 pairs whose shorter answer is chosen and one that is too long, and
    return the settings.
    """
    lines = [
        {
            "prompt": [{"role": "user", "content": f"What is a {word}? {n}"}],
            "chosen": [{"role": "assistant", "content": f"A {word}."}],
            "rejected": [{"role": "assistant", "content": "I do not know that."}],
        }
        for word in WORDS
        for n in range(3)
    ]
    lines.append(
        {**lines[0], "chosen": [{"role": "assistant", "content": "a long story " * 20}]}
    )
    write_jsonl(tmp_path / "pairs.jsonl", lines)
    return {
        "data": [{"path": str(tmp_path / "pairs.jsonl")}],
        "holdout": 0.25,
        "steps": 12,
        "seed": 11,
        "log_every": 1,
        "global_batch_size": 5,
        "micro_batch_size": 3,
        "schedule": {"warmup_steps": 1},
        "optimizer": {"learning_rate": 0.003},
        **changes,
    }


@pytest.mark.slow
def test_training_learns_to_rank_and_records_the_scores_of_the_model(
    run_stage: Any, start: dict[str, Path], tmp_path: Path
) -> None:
    summary = run_stage(
        "reward",
        start,
        config_with(tmp_path, average={"decay": 0.5}),
        tmp_path / "reward",
    )
    lines = read_metrics(tmp_path / "reward")
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert lines[-1]["accuracy"] == 1.0
    assert lines[-1]["margin"] == pytest.approx(
        lines[-1]["scores/chosen"] - lines[-1]["scores/rejected"]
    )
    assert (
        summary["too_long_pairs"],
        summary["training_pairs"] + summary["held_out_pairs"],
    ) == (1, 36)
    held_out = read_jsonl(tmp_path / "reward/data/holdout.jsonl")
    held_out_summary = summary["held_out"]
    assert (
        held_out_summary["accuracy"]["value"]
        == np.mean([line["score_chosen"] > line["score_rejected"] for line in held_out])
        > 0.9
    )
    assert (
        held_out_summary["accuracy"]["low"]
        < 0.9
        < held_out_summary["accuracy"]["high"]
        == 1.0
    )
    assert held_out_summary["longer_chosen"]["value"] == 0.0
    assert held_out_summary["length_correlation"] < -0.5
    margins = {
        line["id"]: line
        for line in pq.read_table(tmp_path / "reward/data/margins.parquet").to_pylist()
    }
    assert len(margins) == 36
    for line in held_out:
        margin_row = margins[line["id"]]
        assert (
            margin_row["held_out"],
            margin_row["chosen"],
            margin_row["rejected"],
        ) == (
            True,
            pytest.approx(line["score_chosen"], abs=1e-5),
            pytest.approx(line["score_rejected"], abs=1e-5),
        )
    smallest = min(margins.values(), key=lambda line: (line["margin"], line["id"]))
    assert summary["margins"]["worst"][0] == {
        **smallest,
        **summary["margins"]["worst"][0],
    }
    assert summary["margins"]["worst"][0]["chosen_text"].startswith("A ")
    (set_summary,) = summary["margins"]["sets"]
    assert (
        set_summary["name"],
        set_summary["trained"]["measured"] + set_summary["held_out"]["measured"],
    ) == (
        "pairs",
        36,
    )
    folder, chat = tmp_path / "reward/data/model", Chat(start["tokenizer"])
    conversations = [
        [*line["prompt"], *line[name]]
        for line in held_out
        for name in ("chosen", "rejected")
    ]
    rows = [chat.encode(messages).ids for messages in conversations]
    ids = torch.full((len(rows), max(map(len, rows))), chat.pad)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.from_numpy(row)
    ours = scores(load_reward_model(folder), ids, chat.pad)
    recorded = [
        line[name] for line in held_out for name in ("score_chosen", "score_rejected")
    ]
    torch.testing.assert_close(ours, torch.tensor(recorded), atol=1e-5, rtol=0)
    average = scores(
        load_reward_model(tmp_path / "reward/data/model-average"), ids, chat.pad
    )
    assert not torch.allclose(average, ours, atol=1e-3)


@pytest.mark.slow
def test_lora_trains_adapters_and_the_score_row_only(
    run_stage: Any, start: dict[str, Path], tmp_path: Path
) -> None:
    config = config_with(
        tmp_path,
        lora={"rank": 4, "targets": ["q_proj"]},
        optimizer={"learning_rate": 0.02},
    )
    summary = run_stage("reward", start, config, tmp_path / "reward")
    assert summary["last_loss"] < summary["first_loss"]
    before = dict(load_model(start["sft"] / "model").named_parameters())
    after = dict(load_reward_model(tmp_path / "reward/data/model").named_parameters())
    changed = {
        name
        for name in before.keys() & after.keys()
        if not torch.equal(before[name][: len(after[name])], after[name])
    }
    assert changed == {
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)
    }
    # Initialised with variance 1 / 33, then trained.
    assert after["score.weight"].shape == (1, 32)
    assert 0.05 < after["score.weight"].std() < 0.6


@pytest.mark.slow
def test_first_loss_is_that_of_random_scores(
    run_stage: Any, start: dict[str, Path], tmp_path: Path
) -> None:
    config, events = (
        config_with(tmp_path, steps=1, global_batch_size=20, margin=4.0),
        list[dict[str, Any]](),
    )
    summary = run_stage(
        "reward", start, config, tmp_path / "reward", emit=events.append
    )
    line = json.loads(
        (tmp_path / "reward/data/metrics.jsonl").read_text().splitlines()[0]
    )
    # Jensen: the mean of a convex function is at least its value at the mean.
    assert summary["first_loss"] >= math.log1p(math.exp(4.0 - line["margin"])) - 1e-6
    assert summary["first_loss"] < 8.0
    assert not any("not trained on" in event.get("message", "") for event in events), (
        "one pair of 37 needs no warning"
    )


@pytest.mark.slow
def test_many_too_long_pairs_are_warned_about(
    run_stage: Any, start: dict[str, Path], tmp_path: Path
) -> None:
    config, events = (
        config_with(tmp_path, steps=1, global_batch_size=4),
        list[dict[str, Any]](),
    )
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    answers = [
        [{"role": "assistant", "content": f"{number} a long story " * 20}]
        for number in range(12)
    ]
    longer = [
        json.dumps({**json.loads(line), "chosen": answer})
        for line, answer in zip(lines, answers, strict=False)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join([*lines, *longer]))
    run_stage("reward", start, config, tmp_path / "reward", emit=events.append)
    assert any("13 of 49 pairs" in event.get("message", "") for event in events)


def test_empty_training_set_is_rejected_with_the_counts(
    run_stage: Any, start: dict[str, Path], tmp_path: Path
) -> None:
    config = config_with(tmp_path, holdout=0.999999)
    with pytest.raises(NothingToTrainError, match=r"37 pairs 1 .*36"):
        run_stage("reward", start, config, tmp_path / "reward")


@pytest.mark.slow
def test_reward_models_and_language_models_are_not_interchangeable(
    run_stage: Any, start: dict[str, Path], tmp_path: Path
) -> None:
    run_stage("reward", start, config_with(tmp_path, steps=1), tmp_path / "reward")
    with pytest.raises(WeightsError, match="is a reward model"):
        load_model(tmp_path / "reward/data/model")
    with pytest.raises(WeightsError, match="is not a reward model"):
        load_reward_model(start["sft"] / "model")
