"""Kahneman-Tversky optimisation: loss by hand, mismatched answers, and a training."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.data.preference_rows import AnswerRows, LabelledError, partners_of
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import load_model, save_model
from gristmill.train.objectives.kto_objective import baseline_of, kto_loss
from gristmill.train.objectives.losses import IGNORED, next_tokens, sequence_logps
from gristmill.train.stages.kto import ranked_right, ranked_right_interval
from tests.train.jsonl import read_jsonl, read_metrics, write_jsonl

WORDS = ("json", "text", "file", "name", "list", "code", "line", "type")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_loss_is_derived_by_hand() -> None:
    """Two desirable answers with log-ratios 3 and -1, an undesirable one with 2; z is
    1, beta 1/2.
    """
    gains, desirable = torch.tensor([3.0, -1.0, 2.0]), torch.tensor([True, True, False])
    losses = kto_loss(gains, desirable, torch.tensor(1.0), 0.5, 2.0, 3.0)
    assert losses.tolist() == pytest.approx(
        [2 * (1 - sigmoid(1.0)), 2 * (1 - sigmoid(-1.0)), 3 * (1 - sigmoid(-0.5))],
        abs=1e-6,
    )


def test_baseline_is_a_clamped_mean_without_gradient() -> None:
    gains = torch.tensor([1.0, -0.5], requires_grad=True)
    assert baseline_of(gains).item() == 0.25
    assert not baseline_of(gains).requires_grad
    assert baseline_of(torch.tensor([-1.0, 0.5])).item() == 0.0


def test_partners_answer_another_prompt_cyclically() -> None:
    """Examples: a pair, two single answers to the same prompt, a pair."""
    examples = np.array([0, 0, 1, 2, 3, 3])
    assert partners_of(examples, [b"x", b"y", b"y", b"z"]).tolist() == [
        2,
        2,
        4,
        4,
        0,
        1,
    ]
    assert partners_of(np.array([0, 0, 1]), [b"x", b"x"]).tolist() == [0, 1, 2]


def test_ranking_accuracy_is_the_area_under_the_curve() -> None:
    assert ranked_right(np.array([2.0, 0.0]), np.array([1.0, 0.0])) == (2 + 0.5) / 4
    assert ranked_right(np.array([]), np.array([1.0])) is None
    assert ranked_right_interval(np.array([]), np.array([1.0])) is None
    # all correct, of four and five answers
    sure = ranked_right_interval(np.arange(5.0, 9.0), np.arange(5.0))
    assert sure == {
        "value": 1.0,
        "low": pytest.approx(0.5101, abs=1e-4),
        "high": 1.0,
        "units": 4,
    }


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_folder: Path,
    mix_folder: Path,
    make_model: Callable[[Shape], Llama],
) -> dict[str, Path]:
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
    return {"tokenizer": tokenizer_folder, "mix": mix_folder, "sft": folder}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """A set of pairs and a set of labelled answers, of which short ones are
    desirable.
    """
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"What is a {word}?"}],
            "chosen": [{"role": "assistant", "content": f"A {word}."}],
            "rejected": [{"role": "assistant", "content": "I do not know that."}],
        }
        for word in WORDS
    ]
    labelled = [
        {
            "prompt": f"Name a {word}, {n}.",
            "completion": f"My {word}." if n else "What do you mean?",
            "label": bool(n),
        }
        for word in WORDS
        for n in range(3)
    ]
    for name, lines in (("pairs", pairs), ("labelled", labelled)):
        write_jsonl(tmp_path / f"{name}.jsonl", lines)
    return {
        "data": [
            {"path": str(tmp_path / f"{name}.jsonl")} for name in ("pairs", "labelled")
        ],
        "sequence_length": 64,
    }


@pytest.fixture
def inputs(
    run_stage: Any, start: dict[str, Path], data: dict[str, Any], tmp_path: Path
) -> dict[str, Path]:
    summary = run_stage("dpo_data", start, data, tmp_path / "rows")
    assert (summary["pairs"], summary["answers"], summary["rows"]) == (8, 24, 40)
    assert [
        (set_summary["desirable"], set_summary["undesirable"])
        for set_summary in summary["sets"]
    ] == [
        (0, 0),
        (16, 8),
    ]
    return {**start, "dpo_data": tmp_path / "rows" / "data"}


def test_answers_are_read_with_labels_and_after_mismatched_prompts(
    inputs: dict[str, Path],
) -> None:
    rows, chat = AnswerRows(PackedSet(inputs["dpo_data"])), Chat(inputs["tokenizer"])
    assert len(rows) == 40
    assert rows.desirable[:4].tolist() == [True, False, True, False]
    assert rows.desirable.sum() == 8 + 16
    all_rows = np.arange(40)

    def texts(ids: torch.Tensor, targets: torch.Tensor) -> list[tuple[str, str]]:
        decoded = []
        for row, row_targets in zip(ids.tolist(), targets.tolist(), strict=True):
            answer = [target for target in row_targets if target != IGNORED]
            first = next(
                place for place, target in enumerate(row_targets) if target != IGNORED
            )
            decoded.append(
                (
                    chat.decode(row[: first + 1], special=True),
                    chat.decode(answer, special=True),
                )
            )
        return decoded

    matched, mixed = texts(*rows.read(all_rows)), texts(*rows.read_mismatched(all_rows))
    for answer, (prompt, text) in enumerate(matched):
        partner = int(rows.partners[answer])
        assert mixed[answer] == (prompt, matched[partner][1])
        assert matched[partner][0] != prompt
        record = rows.records[rows.examples[answer]]
        answer_message = (
            record.get("completion")
            or record["chosen" if rows.desirable[answer] else "rejected"]
        )
        assert text == answer_message[0]["content"] + "<|end|>"


def config_with(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        **data,
        "loss": "kto",
        "holdout": 0.2,
        "steps": 15,
        "seed": 11,
        "log_every": 1,
        "global_batch_size": 6,
        "micro_batch_size": 4,
        "schedule": {"warmup_steps": 1},
        "optimizer": {"learning_rate": 0.003},
        **changes,
    }


@pytest.mark.slow
def test_training_separates_answers_whatever_the_micro_batches(
    run_stage: Any, inputs: dict[str, Path], data: dict[str, Any], tmp_path: Path
) -> None:
    reference = run_stage(
        "reference",
        inputs,
        {"answers": True, "micro_batch_size": 3},
        tmp_path / "reference",
    )
    assert reference["answers"] == 40
    inputs = {**inputs, "reference": tmp_path / "reference" / "data"}
    summary = run_stage("dpo", inputs, config_with(data), tmp_path / "dpo")
    lines = read_metrics(tmp_path / "dpo")
    assert lines[0]["loss"] == pytest.approx(0.5, abs=1e-4)
    assert (lines[0]["kl"], summary["step_0"]["largest_reward"]) == (
        pytest.approx(0, abs=1e-4),
    ) * 2
    assert lines[-1]["loss"] < 0.45
    assert all(line["answers/chosen"] + line["answers/rejected"] == 6 for line in lines)
    assert any("rewards/margins" in line for line in lines)
    assert summary["held_out"]["ranked_right"] > 0.9
    counts = [
        sum(summary[name].values()) for name in ("training_answers", "held_out_answers")
    ]
    assert sum(counts) == 40
    assert min(counts) > 0
    held_out = read_jsonl(tmp_path / "dpo/data/holdout.jsonl")
    model, chat = load_model(inputs["sft"] / "model"), Chat(inputs["tokenizer"])
    for line in held_out:
        for name in ("chosen", "rejected"):
            tokens = chat.encode([*line["prompt"], *line[name]])
            ids = torch.from_numpy(tokens.ids)[None]
            targets = next_tokens(ids, torch.from_numpy(tokens.turns > 0)[None])
            logp = model(ids, partial(sequence_logps, targets=targets))
            assert line[f"reference_{name}"] == pytest.approx(logp.item(), abs=1e-3)
    run_stage(
        "dpo", inputs, config_with(data, micro_batch_size=1, steps=4), tmp_path / "cut"
    )
    split_lines = read_metrics(tmp_path / "cut")
    for ours, theirs in zip(split_lines, lines[:4], strict=True):
        assert {
            name: ours[name] for name in ("loss", "kl", "grad_norm")
        } == pytest.approx(
            {name: theirs[name] for name in ("loss", "kl", "grad_norm")},
            rel=1e-3,
            abs=1e-5,
        )


def test_pair_losses_reject_labelled_answers(
    run_stage: Any, inputs: dict[str, Path], data: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(LabelledError, match=r"24 of 32 examples .* dpo\.loss"):
        run_stage("reference", inputs, {"micro_batch_size": 3}, tmp_path / "reference")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"desirable_weight": 2.0}, "desirable_weight.*sigmoid"),
        ({"loss": "kto", "sft_weight": 0.5}, "sft_weight"),
        ({"loss": "kto", "label_smoothing": 0.1}, "label_smoothing .*kto"),
    ],
)
def test_setting_without_effect_is_rejected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Dpo.model_validate({"steps": 1, "data": [{"path": "pairs.jsonl"}], **options})
