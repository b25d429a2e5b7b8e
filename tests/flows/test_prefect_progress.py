"""Limit of log lines per window, and keys of artifacts."""

from __future__ import annotations

from gristmill.flows.prefect.prefect_progress import LineBudget, artifact_key


def test_bursts_of_log_lines_pass_and_floods_are_counted() -> None:
    budget = LineBudget()
    assert [budget.allows(10.0) for _ in range(60)] == [True] * 50 + [False] * 10
    assert budget.take_held_back() == 10
    # A second later five more may pass.
    assert [budget.allows(11.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert (budget.take_held_back(), budget.take_held_back()) == (2, 0)


def test_artifact_keys_contain_only_characters_allowed_by_prefect() -> None:
    assert artifact_key("dedup_lines-card") == "dedup-lines-card"
