"""What grows with the number of documents is said before it does not fit, and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gristmill.flows.planning import predict
from gristmill.flows.running import capacity
from gristmill.flows.running import run as running
from gristmill.flows.running.run import Runner, StageFailedError
from gristmill.flows.stages.registry import STAGES
from gristmill.flows.stages.stage import Memory
from tests.flows import conftest

Make = Callable[..., Runner]


@pytest.fixture
def grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy stages that hold 100 bytes of every document."""
    plain = conftest.toy_stage
    monkeypatch.setattr(conftest, "toy_stage", lambda name: replace(
        plain(name), memory=Memory(100, "take fewer") if name in ("second", "exhausted") else None))


def test_a_stage_that_will_not_fit_says_so_when_it_starts(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch, grows: None
) -> None:
    runner = toy_runner(first={"n": 2, "kept": 30_000_000}, second={})
    monkeypatch.setattr(running, "available_memory", lambda: 2_000_000_000)
    for stage in runner.plan:
        runner.run_stage(stage)
    warnings = [event["message"] for event in runner.observer.events if event["event"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("second: it holds about 100 bytes of every document in one process, 3.0 GB for "
                                  "30,000,000, and 2.0 GB are free here; take fewer; ")
    enough = toy_runner(first={"n": 2, "kept": 20_000_000}, second={})
    for stage in enough.plan:
        enough.run_stage(stage)
    assert not [event for event in enough.observer.events if event["event"] == "warning"]


def test_a_stage_that_ran_out_of_memory_says_what_it_holds_and_what_helps(toy_runner: Make, grows: None) -> None:
    runner = toy_runner(first={"n": 3, "kept": 5_000_000}, second={"die_once": True}, exhausted={})
    runner.run_stage("first")
    with pytest.raises(StageFailedError, match=r"was killed, most likely out of memory: it holds about 100 bytes of "
                                               r"every document in one process, 0\.5 GB for 5,000,000; take fewer; "):
        runner.run_stage("second")
    runner.run_stage("second")
    with pytest.raises(StageFailedError, match=r"exhausted: out of memory \(no room\): it holds about 100 bytes"):
        runner.run_stage("exhausted")


def test_a_stage_that_holds_some_shards_alone_is_told_to_hold_fewer(toy_runner: Make) -> None:
    with pytest.raises(StageFailedError, match=r"out of memory \(no room\): fewer engine\.workers, or smaller "):
        toy_runner(exhausted={}).run_stage("exhausted")


def test_the_figures_are_those_of_the_stages_that_hold_something_of_every_document() -> None:
    stage = replace(STAGES["mix"], memory=Memory(264, "drop more in `prepare`"))
    assert capacity.shortage(stage, 90_000_000, 24_000_000_000) is None
    sentence = capacity.shortage(stage, 92_000_000, 24_000_000_000)
    assert sentence is not None
    assert sentence.startswith("mix: it holds about 264 bytes of every document in one process, 24.3 GB for 92,000,000,"
                               " and 24.0 GB are free here; ")
    assert capacity.shortage(STAGES["dedup"], 10**12, 1) is None
    assert capacity.shortage(STAGES["mix"], 10**12, 1) is None
    assert capacity.shortage(stage, None, 1) is None
    assert capacity.documents_of({"ingest": {"counts": {"kept": 9}}, "filter": {"counts": {"kept": 4}}, "x": {}}) == 4


def test_a_prediction_refuses_more_documents_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGES, "tokenizer", replace(STAGES["tokenizer"], memory=Memory(180, "give it fewer")))
    totals = {"memory_bytes": 1, "disk_bytes": 1}
    available = {"memory_bytes": 2_000_000_000, "disk_bytes": None}
    found = predict.refusals(totals, available, {"ingest": 1e12, "tokenizer": 12e6, "mix": 1e12})
    assert [sentence.partition(":")[0] for sentence in found] == ["tokenizer"]
    assert "2.2 GB for 12,000,000" in found[0]
