"""A run from a terminal goes on where Prefect cannot: the window may stay dark, the work is done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.running import launch


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The stages of every run that was made without Prefect."""
    runs: list[list[str]] = []
    monkeypatch.setattr(launch, "run_untracked", lambda session, stages, force, observer: runs.append(stages))
    return runs


def start(monkeypatch: pytest.MonkeyPatch, tracking: str, error: Exception, committed: tuple[str, ...] = (),
          force: frozenset[str] = frozenset()) -> int:
    def failing(**_: Any) -> None:
        raise error

    monkeypatch.setattr(launch, "choose_tracking", lambda: (tracking, "where it is shown"))
    monkeypatch.setattr("gristmill.flows.pipeline.gristmill", failing)
    monkeypatch.setattr("gristmill.flows.orchestration.owners.mark_crashed_quietly", lambda: None)
    session: Any = SimpleNamespace(overrides=[], store_option=None, plan={"ingest": None, "filter": None},
                                   manifest_file="a.yaml", store=SimpleNamespace(root=Path("store")),
                                   committed=lambda stage: stage in committed)
    return launch.launch(session, ["ingest", "filter"], force, tracked=True, summarise=False)


def test_a_temporary_server_that_does_not_start_does_not_stop_the_run(
    untracked: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RuntimeError("Timed out while attempting to connect to ephemeral Prefect API server.")
    assert start(monkeypatch, "temporary", error) == 0
    assert untracked == [["ingest", "filter"]]
    assert "this run is not shown there" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("tracking", "message"), [("temporary", "something else"), ("server", "ephemeral")])
def test_every_other_error_is_raised(
    tracking: str, message: str, untracked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=message):
        start(monkeypatch, tracking, RuntimeError(message))
    assert untracked == []


def test_a_run_that_finds_everything_committed_starts_no_server_of_its_own(
    untracked: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unwanted = AssertionError("Prefect was asked")
    assert start(monkeypatch, "temporary", unwanted, committed=("ingest", "filter")) == 0
    assert untracked == [["ingest", "filter"]]
    assert "All stages are committed: nothing is recorded in Prefect" in capsys.readouterr().out
    for tracking, committed, force in (("server", ("ingest", "filter"), ()), ("temporary", ("ingest",), ()),
                                       ("temporary", ("ingest", "filter"), ("filter",))):
        with pytest.raises(AssertionError, match="Prefect was asked"):
            start(monkeypatch, tracking, unwanted, committed, frozenset(force))
