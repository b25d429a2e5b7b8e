"""Reinforcement learning in the report."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.flows.report.facts import Facts
from gristmill.flows.report.training import (
    REWARD,
    reinforcement,
    reward_points,
)
from tests.flows.rendered import html_of

LINES: list[dict[str, Any]] = [
    {
        "step": step,
        "loss": 0.0,
        "reward": 0.1 * step,
        "rewards/exact": 0.05 * step,
        "rewards/format": 0.05 * step,
        "kl": 0.01,
        "entropy": 2.0,
        "completions/mean_length": 7.5,
    }
    for step in (1, 5, 10)
] + [{"step": 10, "validation": {}}]
SUMMARY: dict[str, Any] = {
    "algorithm": "grpo",
    "started_from": "sft",
    "held_out_prompts": 12,
    "first_rewards": {"reward": 0.1, "rewards/exact": 0.05, "rewards/format": 0.05},
    "last_rewards": {"reward": 1.0, "rewards/exact": 0.5, "rewards/format": 0.5},
    "held_out": {
        "reward_before": 0.25,
        "reward": 0.75,
        "difference": {"value": 0.5, "low": 0.25, "high": 0.75, "significant": True},
    },
    "samples": [
        {
            "prompt": "2 + 2?",
            "before": "<b>5</b>",
            "reward_before": 0.0,
            "after": "4",
            "reward": 1.0,
        }
    ],
}
FACTS = Facts(summaries={"rl": SUMMARY}, training={"rl": LINES})


@pytest.mark.slow
def test_the_section_shows_rewards_at_both_ends_and_answers_before_and_after() -> None:
    html = html_of(reinforcement(FACTS))
    assert "<td>all, weighted</td>" in html
    assert '<td class="n">0.100</td><td class="n">1.000</td>' in html
    assert "GRPO from the model of sft" in html
    assert (
        "12 held-out prompts: 0.250 before, 0.750 after; a gain of +0.500 (+0.250 to "
        "+0.750)" in html
    )
    assert "&lt;b&gt;5&lt;/b&gt;" in html
    assert html.count("<svg") == 3


@pytest.mark.slow
def test_recorded_shares_of_answers_prompts_and_calls_are_drawn() -> None:
    share_fields = {"frac_reward_zero_std": 0.5, "completions/clipped_ratio": 0.1}
    curriculum = {
        "pass_rate": 0.25,
        "curriculum/too_hard": 0.5,
        "curriculum/wanted": 0.3,
        "curriculum/too_easy": 0.2,
    }
    tools = {"tools/call_frequency": 1.5, "tools/failure_frequency": 0.1}
    for added, figures, label in (
        (share_fields, 4, "group has one reward"),
        (share_fields | curriculum, 5, "too easy"),
        (share_fields | curriculum | tools, 7, "calls per answer"),
    ):
        html = html_of(
            reinforcement(
                Facts(
                    summaries=FACTS.summaries,
                    training={
                        "rl": [
                            {**line, **added} if REWARD in line else line
                            for line in LINES
                        ]
                    },
                )
            )
        )
        assert html.count("<svg") == figures
        assert label in html


def test_a_run_without_reinforcement_has_no_section() -> None:
    assert reinforcement(Facts()) is None
    assert reward_points([{"step": 1, "loss": 2.0}]) == {}


def test_one_reward_is_one_curve_and_several_are_drawn_beside_their_sum() -> None:
    assert set(reward_points(LINES)) == {"all", "exact", "format"}
    single_reward = [{"step": 1, "reward": 0.5, "rewards/exact": 0.5}]
    assert reward_points(single_reward) == {"reward": [(1, 0.5)]}
