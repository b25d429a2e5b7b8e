"""A run that Prefect shows if one of its servers answers."""

from __future__ import annotations

from pathlib import Path

from gristmill.flows.prefect.choose_prefect import (
    apply_default_settings,
    choose_tracking,
)
from gristmill.flows.running.events import RunNotice, to_all
from gristmill.flows.running.missing_libraries import is_installed
from gristmill.flows.running.recorded_run import RunRequest, run_recorded


def run_tracked(request: RunRequest) -> Path:
    """`run_recorded` in Prefect's flow if a Prefect server is running, else without."""
    if not is_installed("prefect"):  # the extra `ui`
        return run_recorded(request)
    apply_default_settings(quiet_console=True)
    is_shown, sentence = choose_tracking()
    to_all(*request.subscribers)(RunNotice(sentence))
    if not is_shown:
        return run_recorded(request)
    from gristmill.flows.prefect.flow import run_in_flow

    return run_in_flow(request)
