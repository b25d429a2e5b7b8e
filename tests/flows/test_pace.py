"""Progress texts of stages, and the limit of log lines per window."""

from __future__ import annotations

from typing import Any

from gristmill.flows.prefect.prefect_progress import artifact_key
from gristmill.flows.prefect.progress_text import LineBudget, Pace
from gristmill.flows.running.events import StageProgress
from tests.flows.conftest import toy_node


def progress(done: float, total: float, unit: str, **metrics: Any) -> StageProgress:
    return StageProgress(toy_node("first", {}), done, total, unit, **metrics)


def test_progress_names_done_total_loss_tokens_rate_and_time_left() -> None:
    pace = Pace.begin(progress(100, 400, "steps"), now=1000.0)
    event = progress(
        160, 400, "steps", loss=3.2145, tokens=81920, tokens_per_second=2048.0
    )
    # 60 steps took 30 s, so 240 more take 120 s; the 100 steps of an earlier attempt do
    # not count for the rate.
    assert pace.describe(event, now=1030.0) == (
        "160 of 400 steps, loss 3.2145, 81,920 tokens, 2,048 tokens/s, 2 m 0 s left"
    )


def test_progress_of_a_job_of_shards_names_the_job_and_its_rate() -> None:
    pace = Pace.begin(progress(0, 3128, "shards", job="rows"), now=5.0)
    assert (
        pace.describe(progress(0, 3128, "shards"), now=5.0) == "rows: 0 of 3,128 shards"
    )
    assert pace.describe(progress(1564, 3128, "shards"), now=105.0) == (
        "rows: 1,564 of 3,128 shards, 15.6 shards/s, 1 m 40 s left"
    )
    assert pace.describe(progress(3128, 3128, "shards"), now=205.0) == (
        "rows: 3,128 of 3,128 shards, 15.6 shards/s"
    )


def test_a_slow_rate_is_in_seconds_per_unit() -> None:
    pace = Pace.begin(progress(0, 4, "shards"), now=0.0)
    assert pace.describe(progress(1, 4, "shards"), now=131.0) == (
        "1 of 4 shards, 131 s per shard, 6 m 33 s left"
    )


def test_bursts_of_log_lines_pass_and_floods_are_counted() -> None:
    budget = LineBudget()
    assert [budget.allows(10.0) for _ in range(60)] == [True] * 50 + [False] * 10
    assert budget.take_held_back() == 10
    # A second later five more may pass.
    assert [budget.allows(11.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert (budget.take_held_back(), budget.take_held_back()) == (2, 0)


def test_artifact_keys_contain_only_characters_allowed_by_prefect() -> None:
    assert artifact_key("dedup_lines-card") == "dedup-lines-card"
