"""Output for people fits a terminal of 60 columns; text that they copy from it is never
truncated.
"""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.dataprep.whatif_thresholds import Tally
from gristmill.flows.pages.terminal_pages import print_parts
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


def printed_lines(answer: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    answer.show()
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_step_lists_every_example_of_a_row(capsys):
    examples = ["aa", "bb", "cc"]
    trace = StepTrace("sft", 3, "read", [33, 5], [], None, [], examples, [33, 33, 5])
    assert printed_lines(trace, capsys) == [
        "It read 2 rows with 3 examples.",
        *("aa", "row 33", "bb", "row 33", "cc", "row 5"),
    ]


def test_step_prints_what_is_known_of_its_documents(capsys):
    document = RowDocument(
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
    )
    trace = StepTrace("pretrain", 3, "will read", [5], [9], 128, [document])
    lines = printed_lines(trace, capsys)
    assert lines[:2] == [
        "It will read 1 rows with 128 tokens of 1 documents;",
        "checkpoints at 9 know them.",
    ]
    assert lines[3] == "http://a/"
    facts = "128 tokens · web · q 0.5 · 2 duplicates · ffffffffffffffff"
    assert " ".join(lines[4:]) == facts


def test_history_keeps_rule_names_on_one_line(capsys):
    rule = "gopher_repetition/max_duplicate_7gram_char_ratio"
    stages = [
        Judgement("clean", True, "", {}),
        Judgement("filter", False, rule, {"words": 655}, threshold=0.13),
    ]
    place = ("posts", LONG, "{}", 9, "text", "part-0", 1)
    history = Explanation("ab", *place, stages, "dropped by filter")
    lines = printed_lines(history, capsys)
    assert lines[0] == LONG
    assert lines[lines.index("clean kept") :] == [
        "clean kept",
        "",
        "filter dropped:",
        rule,
        "threshold 0.13",
        "words 655",
        "",
        "Text",
        "text ...",
    ]


def test_whatif_sample_prints_the_full_locator(capsys):
    sizes = {"posts": Size(documents=2, bytes=10, tokens=None)}
    sample = CutSample("ab", "posts", LONG, "It is a truth universally known", 399.0)
    rule = "gopher_repetition/max_duplicate_10gram_char_ratio"
    tallies = RuleTallies(Tally(failing=1, only=1), Tally(failing=2, only=1))
    cut = ChangedCut("filter/x", "filter.x", "x", 50, 400, [sample], [])
    answer = WhatIf(sizes, sizes, {}, {rule: tallies}, [cut], tokens_known=False)
    lines = printed_lines(answer, capsys)
    assert f"399 {LONG}" in lines
    assert "It is a truth universally known" in lines
    assert "max_duplicate_10gram_char_ratio     1     2        1     1" in lines


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
    ("steps", "line"), [([5], "steps that read it 5"), ([], "No step reads it.")]
)
def test_steps_of_a_document_are_listed_by_number(
    steps: list[int], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_parts(MixtureUse("trained", None, 1, 8, 1, [3], steps).parts("web"))
    assert capsys.readouterr().out.splitlines()[-1] == line
