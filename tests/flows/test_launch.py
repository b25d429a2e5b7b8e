"""Runs from a terminal, with and without Prefect's engine."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.prefect import tracked_run
from gristmill.flows.running import launch
from gristmill.flows.running.events import RunEvent, RunNotice, Subscriber
from gristmill.flows.running.recorded_run import RunRequest


def request(*subscribers: Subscriber) -> RunRequest:
    node = SimpleNamespace(
        settings=None,
        stage=SimpleNamespace(instances=None, language_models=lambda manifest: None),
    )
    session: Any = SimpleNamespace(
        overrides=[],
        store_option=None,
        plan={"ingest": node, "filter": node},
        manifest=SimpleNamespace(name="toy"),
        manifest_file="a.yaml",
        store=SimpleNamespace(root=Path("store")),
        unfinished=lambda stages, force: list(stages),
        part_of=lambda stage: None,
        stage_server=lambda stages, force: nullcontext(None),
        forget_kept=lambda stages: None,
    )
    return RunRequest(session, ["ingest", "filter"], frozenset(), subscribers)


@pytest.mark.parametrize(
    "inherited_handler", [signal.default_int_handler, signal.SIG_IGN]
)
def test_a_run_handles_interrupts_unless_its_parent_ignores_them(
    inherited_handler: Any,
) -> None:
    handlers: list[Any] = []

    def run(*arguments: Any) -> Path:
        handlers.append(signal.getsignal(signal.SIGINT))
        return Path("run")

    original_handler = signal.signal(signal.SIGINT, inherited_handler)
    try:
        code = launch.launch(request(), run)
        assert code == launch.EXIT_DONE
        assert signal.getsignal(signal.SIGINT) is inherited_handler
    finally:
        signal.signal(signal.SIGINT, original_handler)
    assert handlers == [
        signal.SIG_IGN if inherited_handler is signal.SIG_IGN else launch.interrupt
    ]


def test_every_error_of_the_run_is_raised() -> None:
    def run(*arguments: Any) -> Path:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        launch.launch(request(), run)


def test_prefect_runs_the_flow_only_with_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[RunEvent] = []
    for is_shown in (False, True):
        monkeypatch.setattr(
            tracked_run,
            "choose_tracking",
            lambda is_shown=is_shown: (is_shown, "where it is shown"),
        )
        for module, name in (
            ("prefect.tracked_run", "run_recorded"),
            ("prefect.flow", "run_in_flow"),
        ):
            monkeypatch.setattr(
                f"gristmill.flows.{module}.{name}", lambda *_, name=name: Path(name)
            )
        folder = tracked_run.run_tracked(request(events.append))
        assert folder.name == ("run_in_flow" if is_shown else "run_recorded")
    assert events == [RunNotice("where it is shown")] * 2
