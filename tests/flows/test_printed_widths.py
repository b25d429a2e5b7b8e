"""Output for people fits a terminal of 60 columns; text that they copy from it is never
truncated.
"""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.dataprep.whatif_thresholds import Tally
from gristmill.flows.planning.quantities import at_least, duration, size
from gristmill.flows.questions.explain import Explanation, Judgement, MixtureUse
from gristmill.flows.questions.status import StageState, describe_running
from gristmill.flows.questions.threshold_samples import CutSample
from gristmill.flows.questions.trace_tables import RowDocument, StepTrace
from gristmill.flows.questions.whatif import ChangedCut, RuleTallies, Size, WhatIf

LONG = "18f/2016-07-19-strategies-for-starting-your-own-writing-lab#1234567"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


def step(**fields: Any) -> StepTrace:
    return StepTrace("sft", 3, "read", [33, 5], [], **fields)


def test_step_lists_every_example_of_a_row(capsys):
    step(examples=["aa", "bb", "cc"], rows_of_examples=[33, 33, 5]).show()

    assert capsys.readouterr().out.splitlines() == [
        "sft step 3 read: 2 rows, 3 examples",
        "      33  aa",
        "      33  bb",
        "       5  cc",
    ]


def test_step_prints_full_locators_below_their_columns(capsys):
    documents = [
        RowDocument(
            id="0123456789abcdef0123",
            source="posts",
            locator=LONG,
            cluster_size=1,
            tokens=256,
            rows=[33],
            copies=[0],
        ),
        RowDocument(
            id="f" * 32,
            source="web",
            locator="a#1",
            url="http://a/",
            quality={"q": 0.5},
            cluster="c" * 32,
            cluster_size=3,
            tokens=128,
            rows=[5],
            copies=[0],
        ),
    ]
    step(tokens=384, documents=documents).show()

    assert capsys.readouterr().out.splitlines()[1:] == [
        "     256 tokens  posts  0123456789abcdef  0 duplicates",
        f"         {LONG}",
        "     128 tokens  web  ffffffffffffffff  q 0.5  2 duplicates",
        "         http://a/",
    ]


def test_history_keeps_rule_names_on_one_line_without_empty_lines(capsys):
    Explanation(
        id="ab",
        source="posts",
        locator="a#1",
        metadata="{}",
        characters=9,
        excerpt="text",
        shard="part-0",
        row=1,
        stages=[
            Judgement("clean", True, "", {}),
            Judgement(
                "filter",
                False,
                "gopher_repetition/max_duplicate_7gram_char_ratio",
                {"words": 655},
                threshold=0.13,
            ),
        ],
        outcome="dropped by filter",
    ).show()

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[3:] == [
        "clean     kept",
        "filter    dropped:",
        "          gopher_repetition/max_duplicate_7gram_char_ratio",
        "          threshold 0.13",
        "          words 655",
        "outcome   dropped by filter",
    ]


def test_whatif_sample_prints_the_full_locator_and_a_fitting_excerpt(capsys):
    sizes = {"posts": Size(documents=2, bytes=10, tokens=None)}
    samples = [
        CutSample("ab", "posts", locator, "It is a truth universally known", 399.0)
        for locator in (LONG, "a#1")
    ]
    WhatIf(
        now=sizes,
        then=sizes,
        unseen={},
        rules={
            "gopher_repetition/max_duplicate_10gram_char_ratio": RuleTallies(
                now=Tally(failing=1, only=1), then=Tally(failing=2, only=1)
            )
        },
        cuts=[ChangedCut("filter/x", "filter.x", "x", 50, 400, samples, [])],
        tokens_known=False,
    ).show()

    out = capsys.readouterr().out
    assert f"      399  posts {LONG}\n" in out
    assert "      399  posts a#1  It is a truth universally known\n" in out
    assert "max_duplicate_10gram_char_ratio     1     2        1     1\n" in out


def test_small_sizes_times_and_costs_are_not_rounded_to_zero():
    values = (512, 475_904, 50_600_000, 999_600_000, 1.5e9, 80e9)
    assert [size(value) for value in values] == [
        "512 B",
        "476 kB",
        "50.6 MB",
        "1 GB",
        "1.5 GB",
        "80 GB",
    ]
    assert [duration(hours) for hours in (1e-7, 30 / 3600, 0.5, 3, 72)] == [
        "< 1 s",
        "30.0 s",
        "30.0 min",
        "3.0 h",
        "3.0 d",
    ]
    assert [at_least(value) for value in (0, 0.004, 0.01, 1234.5)] == [
        "0.00",
        "less than 0.01",
        "0.01",
        "1,234.50",
    ]


def test_job_named_like_its_stage_is_printed_once():
    row = StageState(
        stage="filter",
        state="running",
        fingerprint="",
        folder="",
        owner="process 7 on host",
        progress={
            "started": 0.0,
            "at": 9.0,
            "job": "filter",
            "done": 0,
            "total": 4,
            "unit": "shards",
        },
    )

    assert describe_running(row, 9.0) == "for 9 s: 0/4 shards (process 7 on host)"


@pytest.mark.parametrize(
    ("steps", "ending"), [([5], "read by steps 5"), ([], "read by no step")]
)
def test_steps_of_a_document_are_listed_by_number(
    steps: list[int], ending: str
) -> None:
    assert MixtureUse("trained", None, 1, 8, 1, [3], steps).line().endswith(ending)
