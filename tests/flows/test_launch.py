"""Runs from a terminal, with and without Prefect's engine."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.running import launch
from gristmill.flows.stages.stage import Requirements


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The last stage of every run that was made without Prefect's engine."""
    runs: list[str] = []

    def run(
        session: Any, stages: list[str], force: Any, observer: Any, server: Any = None
    ) -> Any:
        runs.append(stages[-1])
        return SimpleNamespace(folder=Path("run"))

    monkeypatch.setattr(launch, "run_untracked", run)
    return runs


def start(
    monkeypatch: pytest.MonkeyPatch,
    is_shown: bool,
    error: Exception,
    committed: tuple[str, ...] = (),
    force: frozenset[str] = frozenset(),
) -> int:
    def failing(**_: Any) -> None:
        raise error

    monkeypatch.setattr(
        launch, "choose_tracking", lambda: (is_shown, "where it is shown")
    )
    monkeypatch.setattr("gristmill.flows.pipeline.gristmill", failing)
    monkeypatch.setattr(
        "gristmill.flows.orchestration.flow_liveness.mark_crashed_quietly", lambda: None
    )
    node = SimpleNamespace(
        settings=None,
        stage=SimpleNamespace(
            instances=None,
            requirements=Requirements(),
        ),
    )
    session: Any = SimpleNamespace(
        overrides=[],
        store_option=None,
        plan={"ingest": node, "filter": node},
        manifest=None,
        manifest_file="a.yaml",
        store=SimpleNamespace(root=Path("store")),
        committed=lambda stage: stage in committed,
        stage_server=lambda stages, force: nullcontext(None),
        forget_kept=lambda stages: None,
    )
    return launch.launch(
        session, ["ingest", "filter"], force, tracked=True, summarise=False
    )


@pytest.mark.parametrize(
    "inherited_handler", [signal.default_int_handler, signal.SIG_IGN]
)
def test_a_run_hears_an_interrupt_itself_unless_whoever_started_it_lets_it_ignore_them(
    inherited_handler: Any, untracked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: list[Any] = []
    monkeypatch.setattr(
        launch,
        "run_untracked",
        lambda *arguments, **options: (
            handlers.append(signal.getsignal(signal.SIGINT)),
            SimpleNamespace(folder=Path("run")),
        )[1],
    )
    original_handler = signal.signal(signal.SIGINT, inherited_handler)
    try:
        assert start(monkeypatch, False, AssertionError("Prefect was asked")) == 0
        assert signal.getsignal(signal.SIGINT) is inherited_handler
    finally:
        signal.signal(signal.SIGINT, original_handler)
    assert handlers == [
        signal.SIG_IGN if inherited_handler is signal.SIG_IGN else launch.interrupt
    ]


def test_every_error_of_the_flow_is_raised(
    untracked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="something else"):
        start(monkeypatch, True, RuntimeError("something else"))
    assert untracked == []


def test_prefect_runs_the_flow_only_with_a_server(
    untracked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = AssertionError("Prefect was asked")
    assert start(monkeypatch, False, error) == 0
    assert untracked == ["filter"]
    with pytest.raises(AssertionError, match="Prefect was asked"):
        start(monkeypatch, True, error)
    assert untracked == ["filter"]
