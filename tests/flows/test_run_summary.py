"""The summary printed at a run's end: the effect of each training."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from gristmill.flows.report.facts import Facts
from gristmill.flows.report.terminal_summary import print_losses
from gristmill.flows.report.training import EFFECT_COLUMNS, effect_rows
from tests.flows.rendered import facts_of

SHARES = {"units": 60, "value": 0.7, "low": 0.57, "high": 0.8}


def facts(**summaries: Any) -> Facts:
    record = [
        {
            "step": 1,
            "loss": 8.0,
            "bits_per_byte": 3.4,
            "sources": {"web": {"bits_per_byte": 3.5}},
        },
        {
            "step": 9,
            "validation": {
                "web": {"bits_per_byte": 2.0},
                "books": {"bits_per_byte": 3.6},
            },
        },
    ]
    training = {"pretrain": record, **{name: [] for name in summaries}}
    return facts_of(training=training, summaries=summaries)


def test_effects_of_trainings_are_measured_on_held_out_data() -> None:
    effects = effect_rows(
        facts(
            sft={"held_out_before": {"loss": 6.25}, "held_out": {"loss": 5.0}},
            dpo={"held_out": {"reward_accuracy_interval": SHARES}},
            rl={
                "held_out_prompts": 40,
                "held_out": {
                    "reward_before": 0.25,
                    "reward": 0.2,
                    "difference": {"value": -0.05, "low": -0.1, "high": 0.01},
                },
            },
        )
    )
    assert effects == [
        ("pretrain", "text of web", "3.500", "2.000", "better"),
        # the first batch had no row of books
        ("pretrain", "text of books", "3.400", "3.600", "worse"),
        ("sft", "answers", "6.250", "5.000", "better"),
        ("dpo", "60 pairs", "50%", "70%", "above chance (57% to 80%)"),
        (
            "rl",
            "rewards of 40 prompts",
            "0.250",
            "0.200",
            "within noise (-0.100 to +0.010)",
        ),
    ]
    assert {len(row) for row in effects} == {len(EFFECT_COLUMNS)}


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.0, 0.0, "the same"),
        (0.1, 0.2, "better"),
        (-0.2, -0.1, "worse"),
        (-0.1, 0.2, "within noise (-0.100 to +0.200)"),
    ],
)
def test_reward_gain_counts_only_if_its_interval_excludes_zero(
    low: float, high: float, verdict: str
) -> None:
    gain = {
        "reward_before": 0.2,
        "reward": 0.3,
        "difference": {"value": 0.1, "low": low, "high": high},
    }
    assert (
        effect_rows(facts(rl={"held_out_prompts": 7, "held_out": gain}))[-1][-1]
        == verdict
    )


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.45, 0.8, "within chance (45% to 80%)"),
        (0.2, 0.4, "below chance (20% to 40%)"),
    ],
)
def test_unlearned_preferences_are_reported(
    low: float, high: float, verdict: str
) -> None:
    interval = {**SHARES, "low": low, "high": high}
    assert (
        effect_rows(facts(dpo={"held_out": {"reward_accuracy_interval": interval}}))[
            -1
        ][-1]
        == verdict
    )
    assert (
        effect_rows(facts(reward={"margins": {"right": {"held_out": interval}}}))[-1][
            -1
        ]
        == verdict
    )


def test_run_without_held_out_examples_omits_their_effects() -> None:
    assert [
        row[0]
        for row in effect_rows(
            facts(sft={"held_out": None}, dpo={}, rl={"held_out": None})
        )
    ] == [
        "pretrain",
        "pretrain",
    ]
    console = Console(file=io.StringIO(), width=80)
    print_losses(Facts(training={"sft": [{"step": 1, "loss": 2.0}]}), console)
    assert "What each stage changed" not in console.file.getvalue()  # type: ignore[attr-defined]
