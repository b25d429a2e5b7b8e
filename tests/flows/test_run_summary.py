"""The summary printed at a run's end: a picture of the funnel, the effect of each
training, and a question to try next.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gristmill.dataprep.whatif_thresholds import Rule
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.stage_summaries import StageCounts, read_as
from gristmill.flows.report.terminal_summary import (
    draw_funnel,
    looser_setting,
    print_losses,
)
from gristmill.flows.report.training import EFFECT_COLUMNS, effect_rows
from tests.flows.rendered import facts_of

SHARES = {"units": 60, "value": 0.7, "low": 0.57, "high": 0.8}


def drawn(
    rows: list[dict[str, Any]], encoding: str = "utf-8", width: int = 80
) -> list[str]:
    sink = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=sink, width=width)
    draw_funnel(read_as(list[StageCounts], rows), console)
    sink.flush()
    return [
        line.rstrip()
        for line in sink.buffer.getvalue().decode(encoding).splitlines()
        if line.strip()
    ]  # type: ignore[attr-defined]


def test_funnel_bars_are_proportional_to_kept_documents() -> None:
    rows = [
        {"stage": "ingest", "read": 200, "kept": 200},
        {"stage": "filter", "read": 200, "kept": 101},
        {"stage": "dedup", "read": 101, "kept": 50},
    ]
    full_bar, half_bar, quarter_bar = (line.split()[1] for line in drawn(rows))
    # 20.2 and 10 of 40 characters
    assert [len(bar) for bar in (full_bar, half_bar, quarter_bar)] == [40, 21, 10]
    assert half_bar == "█" * 20 + "▎"  # two eighths of a character
    assert [line.split()[-1] for line in drawn(rows)] == ["100%", "50%", "25%"]
    assert [line.split()[1] for line in drawn(rows, "ascii")] == [
        "#" * 40,
        "#" * 20,
        "#" * 10,
    ]
    assert max(map(len, drawn(rows, width=40))) <= 40


def test_funnel_without_drops_is_not_drawn() -> None:
    assert drawn([{"stage": "ingest", "read": 10, "kept": 10}]) == []
    assert (
        drawn(
            [{"stage": stage, "read": 10, "kept": 10} for stage in ("ingest", "filter")]
        )
        == []
    )
    assert (
        drawn(
            [{"stage": stage, "read": 0, "kept": 0} for stage in ("ingest", "filter")]
        )
        == []
    )


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


def rule(name: str, bound: Any, side: Any) -> Rule:
    return Rule(
        name,
        f"filter.rules.gopher_quality.{name}",
        "x",
        bound,
        lambda columns: np.zeros(0, bool),
        ("x",),
        side=side,
    )


@pytest.mark.parametrize(
    ("bound", "side", "looser_bound"),
    [
        (50, "min", "25"),
        (2, "min", "1"),
        (10, "max", "15"),
        (0.15, "max", "0.225"),
        (0.8, "max", "1"),
        (0.75, "min", "0.375"),
    ],
)
def test_suggested_whatif_halves_the_threshold_that_dropped_most(
    bound: Any, side: Any, looser_bound: str
) -> None:
    rules = {
        "filter": [
            rule("less", 3, "min"),
            rule("most", bound, side),
            rule("words", "list", "min"),
        ]
    }
    dropped = {"filter": {"counts": {"dropped": {"less": 4, "most": 9, "words": 20}}}}
    assert (
        looser_setting(rules, dropped) == f"filter.gopher_quality.most={looser_bound}"
    )
    assert looser_setting(rules, {}) is None
    # no bound is looser
    assert looser_setting({"filter": [rule("most", 1, "min")]}, dropped) is None
