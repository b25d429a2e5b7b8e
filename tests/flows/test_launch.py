"""A run from a terminal goes on where Prefect cannot: the window may stay dark, the work is done."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.running import launch


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How every run that was made without Prefect's engine is shown."""
    runs: list[str] = []

    def run(session: Any, stages: list[str], force: Any, observer: Any, server: Any = None, keep: bool = False) -> Any:
        runs.append("kept" if keep else "nowhere")
        return SimpleNamespace(folder=Path("run"))

    monkeypatch.setattr(launch, "run_untracked", run)
    return runs


def start(
    monkeypatch: pytest.MonkeyPatch,
    tracking: str,
    error: Exception,
    committed: tuple[str, ...] = (),
    force: frozenset[str] = frozenset(),
) -> int:
    def failing(**_: Any) -> None:
        raise error

    monkeypatch.setattr(launch, "choose_tracking", lambda: (tracking, "where it is shown"))
    monkeypatch.setattr("gristmill.flows.pipeline.gristmill", failing)
    monkeypatch.setattr("gristmill.flows.orchestration.owners.mark_crashed_quietly", lambda: None)
    node = SimpleNamespace(settings=None, stage=SimpleNamespace(instances=None, asks=lambda manifest: ()))
    session: Any = SimpleNamespace(
        overrides=[],
        store_option=None,
        plan={"ingest": node, "filter": node},
        manifest=None,
        manifest_file="a.yaml",
        store=SimpleNamespace(root=Path("store")),
        committed=lambda stage: stage in committed,
        stage_server=lambda stages, force: nullcontext(None),
    )
    return launch.launch(session, ["ingest", "filter"], force, tracked=True, summarise=False)


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_a_run_hears_an_interrupt_itself_unless_whoever_started_it_lets_it_ignore_them(
    before: Any, untracked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(
        launch,
        "run_untracked",
        lambda *told, **more: (heard.append(signal.getsignal(signal.SIGINT)), SimpleNamespace(folder=Path("run")))[1],
    )
    own = signal.signal(signal.SIGINT, before)
    try:
        assert start(monkeypatch, "none", AssertionError("Prefect was asked")) == 0
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, own)
    assert heard == [signal.SIG_IGN if before is signal.SIG_IGN else launch.interrupt]


def test_every_error_of_the_flow_is_raised(untracked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="something else"):
        start(monkeypatch, "server", RuntimeError("something else"))
    assert untracked == []


def test_only_a_run_that_a_server_watches_and_that_makes_something_goes_through_prefects_engine(
    untracked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unwanted, told = AssertionError("Prefect was asked"), list[str]()
    monkeypatch.setattr(launch, "tell_kept_quietly", told.append)
    monkeypatch.setattr(launch, "find_api", lambda: "http://here/api")
    for tracking in ("kept", "none"):
        assert start(monkeypatch, tracking, unwanted) == 0
    assert (untracked, told) == (["kept", "nowhere"], [])
    assert start(monkeypatch, "server", unwanted, committed=("ingest", "filter")) == 0
    assert (untracked, told) == (["kept", "nowhere", "kept"], ["http://here/api"])
    for committed, force in ((("ingest",), ()), (("ingest", "filter"), ("filter",))):
        with pytest.raises(AssertionError, match="Prefect was asked"):
            start(monkeypatch, "server", unwanted, committed, frozenset(force))
