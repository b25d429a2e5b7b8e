"""Manifests of tests, opened with a store beside them, and runs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill.flows.cli.launch import launch
from gristmill.flows.running.run import Runner
from gristmill.flows.running.session import Session, open_session


def open_beside(manifest: Path, *settings: str, **options: Any) -> Session:
    """Open a manifest with the store `store` in its folder; see `open_session`."""
    store = str(manifest.parent / "store")
    return open_session(str(manifest), list(settings), store, **options)


def run_all(session: Session) -> int:
    """Run all stages of a session like `gristmill run`, and return the exit code."""
    return launch(session, list(session.plan), frozenset(), False, summarise=True)


def finish(runner: Runner) -> Runner:
    """Run the stages of a runner one after the other."""
    for stage in runner.session.plan:
        runner.run_stage(stage)
    return runner
