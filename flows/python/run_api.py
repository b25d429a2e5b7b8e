"""`gristmill.run`, `gristmill.plan` and `gristmill.ablate`: the commands `run`, `plan`
and `ablate` from Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from gristmill.core.files import read_json
from gristmill.core.secrets import MaskedStream
from gristmill.core.store import store_at
from gristmill.flows.prefect.tracked_run import run_tracked
from gristmill.flows.python.finished_run import Run, Store
from gristmill.flows.python.manifest_builder import (
    Manifest,
    file_to_run,
    overrides_of,
    written_keys,
)
from gristmill.flows.questions.what_changed import PlannedStage, explain_plan
from gristmill.flows.running.launch import run_stages
from gristmill.flows.running.missing_libraries import check_libraries
from gristmill.flows.running.recorded_run import RunRequest, run_recorded
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.running.terminal import (
    LastingStream,
    TerminalObserver,
    plain_console,
)

if TYPE_CHECKING:
    from gristmill.flows.sweeps.ablation_results import AblationResults


def run(
    manifest: str | Path | Manifest,
    *,
    until: str | None = None,
    set: Mapping[str, Any] | None = None,
    store: str | Path | Store | None = None,
    force: Sequence[str] = (),
    keep: Sequence[str] = (),
    progress: bool = True,
    prefect: bool = False,
) -> Run:
    """Run a manifest, reusing committed stages and resuming unfinished ones.

    Stages run in processes of their own, as with `gristmill run`, and import nothing of
    the caller. An interrupt (Ctrl-C, or a notebook's stop button) ends them first; the
    next run resumes.

    Args:
        manifest: file or object.
        until: last stage to run.
        set: overridden settings by key, such as `{"pretrain.steps": 50}`.
        store: folder or URL of the outputs; None means $GRISTMILL_STORE, else
            ./gristmill-store.
        force: stages to rebuild even if they are committed.
        keep: stages whose committed outputs are kept even if their versions changed.
        progress: show progress.
        prefect: record the run in Prefect, as the command line does.

    Returns:
        The finished run.

    Raises:
        ManifestError: the manifest is invalid; nothing was run.
        UnknownStageError: the manifest has no such stage.
        StoreLocationError: the location cannot hold a store.
        MissingLibraryError: a stage needs a library that is not installed; nothing was
            run.
        NothingToKeepError: the store has no output of an earlier version of a stage to
            keep.
        StageFailedError: a stage failed; committed outputs stay, and the same call
            resumes.
    """
    session = _open_manifest(manifest, set, store, until, to_run=True)
    session.check_stages([*force, *keep])
    session.keep(keep)
    console = plain_console(
        cast(TextIO, MaskedStream(cast(TextIO, LastingStream(sys.stdout))))
    )
    console.quiet = not progress
    stages = list(session.plan)
    check_libraries(session, stages, frozenset(force))
    observers = [TerminalObserver(console, stages)]
    request = RunRequest(session, stages, frozenset(force), observers)
    folder = run_stages(request, run_tracked if prefect else run_recorded)
    return Run(session.store, read_json(folder / "run.json"), session)


def plan(
    manifest: str | Path | Manifest,
    *,
    until: str | None = None,
    set: Mapping[str, Any] | None = None,
    store: str | Path | Store | None = None,
    force: Sequence[str] = (),
) -> list[PlannedStage]:
    """Return the actions of `run` with the same arguments, and their reasons; nothing
    is run or written.

    Raises:
        ManifestError: the manifest is invalid.
        UnknownStageError: the manifest has no such stage.
    """
    session = _open_manifest(manifest, set, store, until, to_run=False)
    session.check_stages(force)
    return explain_plan(session, frozenset(force))


def ablate(
    manifest: str | Path,
    arms: str | Path | Mapping[str, Any] | None = None,
    *,
    each_rule: bool = False,
    quick: bool = False,
    set: Mapping[str, Any] | None = None,
    store: str | Path | Store | None = None,
    progress: bool = True,
) -> AblationResults:
    """Train small models on variants of the prepared documents, and tell which variants
    make a better model.

    Trainings are outputs in the store: an interrupted ablation resumes, and a repeated
    one reuses them.

    Args:
        manifest: file.
        arms: file with arms, budget and rule, or its content.
        each_rule: compare no rule set of the filters, each left out, and each alone.
        quick: train the smallest proxies, with three seeds and a learning rate.
        set: overridden settings by key, in all arms.
        store: as for `run`.
        progress: show progress.

    Raises:
        ManifestError: the manifest or an arm is invalid; nothing was run.
        StageFailedError: a stage that all arms share failed.
        ValueError: `arms` has unknown keys or parts, or a source has no held-out text.
    """
    from gristmill.flows.sweeps.ablation import (
        plan_ablation,
        read_ablation,
        run_ablation,
    )
    from gristmill.flows.sweeps.ablation_results import analyse_ablation, fix_rule

    location = _location_of(store)
    file = Path(arms) if isinstance(arms, str) else arms
    settings = read_ablation(file, each_rule, quick)
    planned = plan_ablation(settings, str(manifest), overrides_of(set), location)
    earlier_rule = fix_rule(planned, store_at(location))
    with nullcontext(sys.stdout) if progress else open(os.devnull, "w") as output:
        trained = run_ablation(planned, cast(TextIO, output))
    return analyse_ablation(planned, trained, earlier_rule)


def _location_of(store: str | Path | Store | None) -> str | None:
    if isinstance(store, Store):
        return str(store.path)
    return None if store is None else str(store)


def _open_manifest(
    manifest: str | Path | Manifest,
    set: Mapping[str, Any] | None,
    store: str | Path | Store | None,
    until: str | None,
    to_run: bool,
) -> Session:
    """Open a manifest; `to_run` lets user code list sources, and saves a manifest
    without a file in the store.
    """
    location = _location_of(store)
    if not isinstance(manifest, Manifest):
        return open_session(
            str(manifest),
            overrides_of(set),
            location,
            until,
            exactly=True,
            allow_code=to_run,
        )
    changed = manifest.replace(set) if set else manifest
    file = (
        file_to_run(changed, store_at(location))
        if to_run
        else str(changed.file or f"{changed.name}.yaml")
    )
    return open_session(
        file,
        [],
        location,
        until,
        exactly=True,
        allow_code=to_run,
        given=(changed.settings, written_keys(changed)),
    )
