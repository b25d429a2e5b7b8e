"""The Prefect flow of a sweep: one task for the stages that all mixtures share, and one per mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from pydantic import NonNegativeFloat

from gristmill.flows.owners import owned_run
from gristmill.flows.parameters import Count, FilePath, Setting
from gristmill.flows.pipeline import TRAINING_TAG, observer_of_caller
from gristmill.flows.reporting import PrefectObserver, publish_refusal
from gristmill.flows.run import Observer
from gristmill.flows.sweeps.proxies import Sweep, plan_sweep, run_mixture, run_shared


@task(name="shared stages", cache_policy=NO_CACHE, persist_result=False, retries=0)
def shared_stages(sweep: Sweep, observer: Observer) -> None:
    """Make what all mixtures share."""
    run_shared(sweep, observer)


@task(cache_policy=NO_CACHE, persist_result=False, retries=0)
def mixture(sweep: Sweep, number: int, observer: Observer) -> dict[str, Any]:
    """Train the proxies of one mixture."""
    return run_mixture(sweep, number, observer)


@flow(name="gristmill-sweep", flow_run_name="mixtures of {manifest}", persist_result=False, log_prints=False)
def gristmill_sweep(
    manifest: FilePath, grid: FilePath, steps: Count, seeds: Count = 1, model: dict[str, Any] | None = None,
    overrides: tuple[Setting, ...] = (), store: str = "", target: dict[str, NonNegativeFloat] | None = None,
) -> list[dict[str, Any]]:
    """Train a small proxy on every mixture of a grid.

    Args:
        manifest: Path of the YAML manifest, as the machine that runs the flow sees it.
        grid: Path of the sweep's file: a list of weights, or a mapping with mixtures, grid and dirichlet.
        steps: Training steps of every proxy; at least 1.
        seeds: Proxies per mixture, for the spread between runs; at least 1.
        model: Keys of pretrain.model that differ from the proxy's (2 layers of width 128 with 4 heads).
        overrides: Settings that replace the manifest's, one each, such as pretrain.global_batch_size=8
        store: Folder or URL of the outputs; empty for the default.
        target: How much each source counts in the mean; the manifest's weights if absent.
    """
    with owned_run():
        try:
            sweep = plan_sweep(manifest, Path(grid), steps, seeds, model or {}, list(overrides), store or None, target)
        except Exception as error:
            publish_refusal(manifest, error)
            raise
        return _run(sweep)


def _run(sweep: Sweep) -> list[dict[str, Any]]:
    observer = PrefectObserver(observer_of_caller.get())
    outcomes = []
    try:
        shared_stages(sweep, observer)
        for number in range(len(sweep.mixtures)):
            name = f"mixture-{number:02d}"
            named: Any = mixture.with_options(name=name, task_run_name=name, tags={TRAINING_TAG})
            outcomes.append(named(sweep, number, observer))
    finally:
        observer.close()
    return outcomes
