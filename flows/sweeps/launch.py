"""Running a sweep from a terminal: through its Prefect flow or without it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from rich.text import Text

from gristmill.dataprep.secrets import mask_secrets
from gristmill.flows.launch import interrupt
from gristmill.flows.sweeps.proxies import Sweep, run_mixture, run_shared
from gristmill.flows.terminal import LastingStream, TerminalObserver, plain_console
from gristmill.flows.tracking import apply_default_settings, choose_tracking


def launch_sweep(
    sweep: Sweep, grid_file: Path, steps: int, model: Mapping[str, Any], overrides: list[str], tracked: bool,
) -> list[dict[str, Any]]:
    """Train every proxy that is not trained yet; returns the outcomes of all mixtures.

    Raises:
        StageFailedError: a stage that all mixtures share failed.
        LeaseLostError: another run took a stage over while this one was paused.
        KeyboardInterrupt: by the user, or SIGTERM; the same command goes on.
    """
    console = plain_console(cast(TextIO, LastingStream(sys.stdout)))
    observer = TerminalObserver(console)
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        if tracked:
            apply_default_settings(quiet_console=True)
            tracking, sentence = choose_tracking()
            console.print(Text(sentence, style="dim"))
            if tracking != "none":
                return _run_tracked(sweep, grid_file, steps, model, overrides, observer)
        run_shared(sweep, observer)
        return [run_mixture(sweep, number, observer) for number in range(len(sweep.mixtures))]
    finally:
        observer.stop_bar()
        signal.signal(signal.SIGTERM, previous)


def _run_tracked(
    sweep: Sweep, grid_file: Path, steps: int, model: Mapping[str, Any], overrides: list[str],
    observer: TerminalObserver,
) -> list[dict[str, Any]]:
    from gristmill.flows.owners import show_cancelled
    from gristmill.flows.parameters import ProxyModel, SourceShare
    from gristmill.flows.pipeline import observer_of_caller
    from gristmill.flows.sweeps.pipeline import gristmill_sweep, sweep_of_caller

    tokens = observer_of_caller.set(observer), sweep_of_caller.set(sweep)
    # Prefect keeps these for everybody to read; what the flow works with is the sweep.
    shown: dict[str, Any] = mask_secrets({"overrides": overrides, "store": sweep.store or ""})
    shown["overrides"] = tuple(shown["overrides"])
    try:
        return gristmill_sweep(
            manifest=sweep.manifest_file, grid=str(grid_file), steps=steps, seeds=len(sweep.seeds),
            model=ProxyModel.of(model), target=tuple(SourceShare(source=name, share=share)
                                                    for name, share in sweep.target.items()), **shown)
    finally:
        observer_of_caller.reset(tokens[0])
        sweep_of_caller.reset(tokens[1])
        show_cancelled()
