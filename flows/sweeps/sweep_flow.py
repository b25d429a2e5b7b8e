"""Prefect flow of a sweep, with one task for the stages that all mixtures share and one
per mixture, and its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar, cast

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from gristmill.core.secrets import mask_secrets
from gristmill.flows.orchestration.choose_prefect import (
    apply_default_settings,
    choose_tracking,
)
from gristmill.flows.orchestration.flow_liveness import owned_run
from gristmill.flows.orchestration.parameters import (
    Count,
    FilePath,
    ProxyModel,
    RefusedError,
    Setting,
    SourceShare,
    refuse_secrets,
    run_name,
)
from gristmill.flows.orchestration.prefect_progress import PrefectObserver
from gristmill.flows.orchestration.reporting import (
    failed,
    publishing_refusal,
)
from gristmill.flows.pipeline import TRAINING_TAG, call_in_flow
from gristmill.flows.running.events import RunNotice, Subscriber, to_all
from gristmill.flows.running.launch import interruptible
from gristmill.flows.running.terminal import (
    LastingStream,
    TerminalObserver,
    plain_console,
)
from gristmill.flows.sweeps.proxies import (
    MixtureOutcome,
    Sweep,
    plan_sweep,
    run_mixture,
    run_shared,
)

T = TypeVar("T")
PROXY = ProxyModel()
SHARED = "shared stages"


def name_of_run() -> str:
    """Return the name of the current flow run."""
    parameters = flow_run.parameters
    return (
        "mixtures of "
        f"{run_name(parameters['manifest'], parameters.get('overrides', ()))}"
    )


@flow(
    name="gristmill-sweep",
    flow_run_name=name_of_run,
    persist_result=False,
    log_prints=False,
)
def gristmill_sweep(
    manifest: FilePath,
    grid: FilePath,
    steps: Count,
    seeds: Count = 1,
    model: ProxyModel = PROXY,
    overrides: tuple[Setting, ...] = (),
    store: str = "",
    target: tuple[SourceShare, ...] = (),
) -> list[MixtureOutcome] | State:
    """Train a small proxy on every mixture of a grid.

    Args:
        manifest: Path of the YAML manifest, as the machine that runs the flow sees it.
        grid: Path of the sweep's file: a list of weights, or a mapping with mixtures,
            grid and dirichlet.
        steps: Training steps of every proxy; at least 1.
        seeds: Proxies per mixture, for the spread between runs; at least 1.
        model: The proxy's size.
        overrides: Settings that replace the manifest's, one each, such as
            pretrain.global_batch_size=8
        store: Folder or URL of the outputs; empty for the default.
        target: Share of each source in the objective; the manifest's weights if empty.
    """
    with owned_run():
        shares = {
            source_share.source: source_share.share for source_share in target
        } or None
        try:
            with publishing_refusal(manifest):
                refuse_secrets(overrides, store)
                sweep = plan_sweep(
                    manifest,
                    Path(grid),
                    steps,
                    seeds,
                    model.as_keys(),
                    list(overrides),
                    store or None,
                    shares,
                )
        except RefusedError as refusal:
            return failed(refusal)
        return _run(sweep)


def _run(sweep: Sweep, subscribers: Sequence[Subscriber] = ()) -> list[MixtureOutcome]:
    """Run a task for the stages that all mixtures share, and one per mixture."""
    observer = PrefectObserver()
    emit = to_all(*subscribers, observer)
    try:
        _run_task(SHARED, set(), partial(run_shared, sweep, emit))
        return [
            _run_task(
                f"mixture-{number:02d}",
                {TRAINING_TAG},
                partial(run_mixture, sweep, number, emit),
            )
            for number in range(len(sweep.mixtures))
        ]
    finally:
        observer.close()


def _run_task(name: str, tags: set[str], work: Callable[[], T]) -> T:
    @task(
        name=name,
        task_run_name=name,
        tags=tags,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=0,
    )
    def run_work() -> T:
        return work()

    return run_work()


def launch_sweep(
    sweep: Sweep,
    grid_file: Path,
    steps: int,
    model: Mapping[str, object],
    overrides: list[str],
    tracked: bool,
    output: TextIO,
) -> list[MixtureOutcome]:
    """Train every proxy that is not trained yet, and return the outcomes of all
    mixtures.

    Args:
        sweep: the planned sweep.
        grid_file, steps, model, overrides: arguments of the plan, shown by Prefect.
        tracked: whether to record the sweep in Prefect.
        output: stream of the progress display.

    Raises:
        StageFailedError: a stage that all mixtures share failed.
        LeaseLostError: another run took over a stage while this one was paused.
        KeyboardInterrupt: the user pressed Ctrl+C or SIGTERM arrived; the same command
            resumes the sweep.
    """
    console = plain_console(cast(TextIO, LastingStream(output)))
    observer = TerminalObserver(console)
    # Prefect shows these parameters to every user of the server; the flow itself works
    # with the sweep.
    parameters: dict[str, object] = {
        "manifest": sweep.manifest_file,
        "grid": str(grid_file),
        "steps": steps,
        "seeds": len(sweep.seeds),
        "model": ProxyModel.of(model),
        "target": tuple(
            SourceShare(source=name, share=share)
            for name, share in sweep.target.items()
        ),
        **mask_secrets({"overrides": overrides, "store": sweep.store or ""}),
    }
    try:
        with interruptible():
            if tracked:
                apply_default_settings(quiet_console=True)
                is_shown, sentence = choose_tracking()
                observer(RunNotice(sentence))
                if is_shown:
                    return call_in_flow(
                        gristmill_sweep, parameters, lambda: _run(sweep, [observer])
                    )
            run_shared(sweep, observer)
            return [
                run_mixture(sweep, number, observer)
                for number in range(len(sweep.mixtures))
            ]
    finally:
        observer.stop_bars()
