"""A run from a terminal goes on where Prefect cannot: the window may stay dark, the work is done."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.orchestration.tracking import start_temporary_server
from gristmill.flows.running import launch


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The stages of every run that was made without Prefect."""
    runs: list[list[str]] = []

    def run(session: Any, stages: list[str], force: Any, observer: Any, server: Any = None) -> Any:
        runs.append(stages)
        return SimpleNamespace(folder=Path("run"))

    monkeypatch.setattr(launch, "run_untracked", run)
    return runs


def start(monkeypatch: pytest.MonkeyPatch, tracking: str, error: Exception, committed: tuple[str, ...] = (),
          force: frozenset[str] = frozenset(), starts: bool = True) -> int:
    def failing(**_: Any) -> None:
        raise error

    monkeypatch.setattr(launch, "choose_tracking", lambda: (tracking, "where it is shown"))
    monkeypatch.setattr(launch, "start_temporary_server", lambda: starts)
    monkeypatch.setattr("gristmill.flows.pipeline.gristmill", failing)
    monkeypatch.setattr("gristmill.flows.orchestration.owners.mark_crashed_quietly", lambda: None)
    session: Any = SimpleNamespace(overrides=[], store_option=None, plan={"ingest": None, "filter": None},
                                   manifest_file="a.yaml", store=SimpleNamespace(root=Path("store")),
                                   committed=lambda stage: stage in committed,
                                   stage_server=lambda stages, force: nullcontext(None))
    return launch.launch(session, ["ingest", "filter"], force, tracked=True, summarise=False)


def test_a_temporary_server_that_does_not_start_does_not_stop_the_run(
    untracked: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(monkeypatch, "temporary", AssertionError("Prefect was asked"), starts=False) == 0
    assert untracked == [["ingest", "filter"]]
    assert "this run is not shown there" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("tracking", ["temporary", "server"])
def test_every_error_of_the_flow_is_raised(
    tracking: str, untracked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="something else"):
        start(monkeypatch, tracking, RuntimeError("something else"))
    assert untracked == []


def test_prefects_client_starts_the_temporary_server_and_says_where_it_could_not(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade of Prefect that starts it elsewhere, or later, fails here."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings

    started: list[object] = []

    def fail(server: object) -> None:
        started.append(server)
        raise RuntimeError("not up in time")

    monkeypatch.setattr(SubprocessASGIServer, "start", fail)
    with temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}):
        assert not start_temporary_server()
    assert len(started) == 1


def test_a_run_that_finds_everything_committed_is_recorded_without_prefects_engine(
    untracked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    unwanted, recorded = AssertionError("Prefect was asked"), list[str | None]()
    monkeypatch.setattr(launch, "record_run", lambda session, stages, record, api: recorded.append(api))
    monkeypatch.setattr(launch, "find_api", lambda: "http://here/api")
    for tracking in ("temporary", "server", "none"):
        assert start(monkeypatch, tracking, unwanted, committed=("ingest", "filter")) == 0
    assert untracked == [["ingest", "filter"]] * 3
    assert recorded == [None, "http://here/api"]
    for committed, force in ((("ingest",), ()), (("ingest", "filter"), ("filter",))):
        with pytest.raises(AssertionError, match="Prefect was asked"):
            start(monkeypatch, "temporary", unwanted, committed, frozenset(force))
