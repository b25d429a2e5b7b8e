"""Teachers, reward models, origins of preference margins and rounded exports in the
report.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gristmill.flows.report.facts import Facts
from gristmill.flows.report.finetuning import (
    distillation,
    masks,
    preference_effects,
    reward_model,
    unlearned,
)
from gristmill.flows.report.stage_summaries import Margins, read_as
from gristmill.flows.report.training import loss_rows, training_section
from gristmill.train.eval.intervals import share_with_interval
from tests.flows.rendered import text_of

SHARE = {"value": 0.75, "low": 0.5, "high": 0.9, "units": 20}
HELD_OUT = {
    "accuracy": SHARE,
    "longer_chosen": None,
    "length_correlation": -0.25,
    "margin": 1.5,
    "mean": 0.125,
    "deviation": 2.0,
}


def facts(**summaries: Any) -> Facts:
    dpo = [
        {
            "step": step,
            "loss": 0.6,
            "rewards/accuracies": 0.8,
            "rewards/chosen": 0.1,
            "rewards/rejected": -0.2,
            "fell/chosen": 0.25,
            "fell/rejected": 0.9,
            "log_ratio/chosen": 0.01 * step,
            "log_ratio/rejected": -0.05,
        }
        for step in (1, 2)
    ]
    reward = [
        {
            "step": step,
            "loss": 0.5,
            "accuracy": 0.9,
            "scores/chosen": 1.0,
            "scores/rejected": 0.5,
        }
        for step in (1, 2)
    ]
    return Facts(summaries=summaries, training={"reward": reward, "dpo": dpo})


def test_distillation_section_shows_kept_predictions_and_divergence() -> None:
    distilled_facts = facts(
        teacher={
            "tokens": 1200,
            "top_k": 64,
            "rest_mass": 0.0123,
            "temperature": 2.0,
            "loss": 1.5,
        }
    )
    distilled_facts.training["sft"] = [
        {"step": step, "loss": 2.0, "label_loss": 3.0 / step, "divergence": 1.0 / step}
        for step in (1, 2)
    ]
    text = text_of(distillation(distilled_facts))
    assert (
        "tokens of the teacher 1,200 ids kept per token 64 mass of the others 1.230% "
        "temperature 2" in text
    )
    assert (
        "student's loss on the labels, last 1.5000 divergence from the teacher, "
        "first 1.0000 divergence" in text
    )
    assert distillation(facts()) is None


def test_reward_model_section_shows_accuracy_with_interval_and_blanks_for_missing_values() -> (
    None
):
    text = text_of(
        reward_model(
            facts(
                reward={
                    "held_out": HELD_OUT,
                    "training_pairs": 1080,
                    "held_out_pairs": 20,
                    "too_long_pairs": 3,
                }
            )
        )
    )
    assert (
        "chosen answer scores higher, held out 75.0% [50.0%, 90.0%] of 20 chosen "
        "answer is the longer" in text
    )
    assert "pairs trained on 1,080" in text
    assert (
        "correlation of score and length -0.250 mean and deviation of scores 0.125, "
        "2.000" in text
    )
    part = {"measured": 1080, "wrong": 0.25, "median": 0.5}
    text = text_of(
        reward_model(
            facts(
                reward={
                    "held_out": HELD_OUT,
                    "training_pairs": 1080,
                    "held_out_pairs": 20,
                    "too_long_pairs": 3,
                    "margins": {
                        "measured": 1080,
                        "sets": [{"name": "pairs", "trained": part}],
                        "worst": [],
                    },
                }
            )
        )
    )
    assert "pairs trained 1,080 25.0% +0.500" in text
    assert reward_model(facts()) is None


def test_worst_margins_are_shown_with_texts_and_error_shares_per_set() -> None:
    line = {
        "id": "0123456789abcdef0123",
        "set": "pairs",
        "held_out": False,
        "margin": -1.25,
        "prompt_text": "<why>",
    }
    pair = {
        **line,
        "chosen": 0.25,
        "rejected": 1.5,
        "chosen_text": "since",
        "rejected_text": "no idea",
    }
    part = {"measured": 1200, "wrong": 0.125, "median": 0.75}
    sets = [{"name": "pairs", "trained": part}]
    text = text_of(*unlearned(read_as(Margins, {"sets": sets, "worst": [pair]})))
    assert "pairs trained 1,200 12.5% +0.750" in text
    assert "0123456789abcdef pairs trained -1.250 <why> since no idea" in text
    assert unlearned(None) == []


@pytest.mark.parametrize(
    ("alarm", "sentence"),
    [
        (None, "Chosen answers did not keep becoming less likely."),
        (7, "Alarm at step 7: the margin grew although"),
    ],
)
def test_the_effects_of_preference_optimisation_are_split_by_answer(
    alarm: int | None, sentence: str
) -> None:
    summary = {
        "objective": "sigmoid",
        "chosen_decline": {
            "alarm_step": alarm,
            "fell_chosen": 0.25,
            "fell_rejected": 0.9,
        },
        "held_out_pairs": 40,
        "held_out": {
            "chosen_more_likely_before": 0.5,
            "chosen_more_likely_interval": share_with_interval(np.arange(40) < 24),
            "reward_accuracy_interval": share_with_interval(np.arange(40) < 28),
        },
    }
    text = text_of(preference_effects(facts(dpo=summary)))
    assert "chosen 25.0% +0.0200 +0.1000 rejected 90.0% -0.0500 -0.2000" in text
    assert sentence in text
    assert (
        "On 40 held-out pairs the chosen answer gained more in 70.0% [54.6%, 81.9%], "
        "and is the likelier one in 60.0% [44.6%, 73.7%], 50.0% before." in text
    )
    assert preference_effects(Facts()) is None


def test_held_out_examples_are_reported_with_their_loss() -> None:
    set_counts = {
        "name": "chats",
        "records": 9,
        "refused": 0,
        "unrenderable": 0,
        "dropped": 0,
        "truncated": 0,
        "used": 9,
        "drawn_share": 1.0,
        "trained_share": 0.5,
        "end_of_turn_share": 1.0,
        "held_out": 2,
    }
    data = {
        "sets": [set_counts],
        "rows": 3,
        "sequence_length": 64,
        "fill": 0.9,
        "replay": {"rows": 0, "share": 0.0},
    }
    of_classes = {"loss": 1.25, "text_accuracy": 0.875, "mean_f1": 0.8125}
    text = text_of(masks(facts(sft_data=data, sft={"held_out": of_classes})))
    assert "87.5%" in text
    assert "0.812" in text
    text = text_of(masks(facts(sft_data=data, sft={"held_out": {"loss": 1.25}})))
    assert (
        "90.0% full; 2 of the used examples are held out, whose loss is 1.2500 in "
        "the end" in text
    )
    assert "held out" not in text_of(
        masks(facts(sft_data={**data, "sets": [{**set_counts, "held_out": 0}]}, sft={}))
    )


@pytest.mark.slow
def test_early_stopped_training_shows_step_and_reason() -> None:
    """Its last step may be one without a log line, and nothing held out may say what it
    changed.
    """
    stopped = {
        "callback": "hooks:plateau",
        "step": 7,
        "reason": "no better for 3 validations",
    }
    (_, dpo) = loss_rows(facts(dpo={"stopped_by": stopped}))
    assert (dpo.steps, dpo.ended) == (
        7,
        "hooks:plateau ended it after step 7: no better for 3 validations",
    )
    stopped_facts = facts(dpo={"stopped_by": stopped})
    assert (
        "dpo: hooks:plateau ended it after step 7: no better for 3 validations."
        in text_of(training_section(stopped_facts))
    )
    assert "What each stage changed" not in text_of(training_section(stopped_facts))
    assert "ended it" not in text_of(training_section(facts()))
