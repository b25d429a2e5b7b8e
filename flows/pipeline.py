"""The Prefect flows: `gristmill` runs a manifest, `gristmill-stage` one stage of it. One task per stage.

Prefect shows and triggers; skipping, resuming and committing are the store's. A tracking error never fails a stage.
"""

from __future__ import annotations

import contextvars
from typing import Any, Literal

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from gristmill.flows.reporting import PrefectObserver, publish_run
from gristmill.flows.run import Observer, Runner
from gristmill.flows.runs import RunRecord
from gristmill.flows.session import Session, open_session

StageName = Literal[
    "ingest", "clean", "filter", "dedup", "dedup_lines", "dedup_substrings", "langid", "quality", "decontaminate",
    "tokenizer", "tokenize", "mix", "pretrain", "sft", "reference", "dpo", "evaluate", "export",
]
observer_of_caller: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("observer", default=None)
"""The display of the terminal that called the flow, where one did."""


@task(cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_stage(runner: Runner, record: RunRecord, stage: str, force: bool) -> State:
    """Bring one stage to its committed output; the state is named after how it got there."""
    outcome = runner.run_stage(stage, force)
    record.add(outcome)
    return Completed(name=outcome.how, data=outcome, message=outcome.note or str(outcome.folder.path))


@flow(name="gristmill", flow_run_name="{manifest}", persist_result=False, log_prints=False)
def gristmill(
    manifest: str = "mixtures/demo.yaml",
    until: StageName = "export",
    force: list[StageName] | None = None,
    overrides: list[str] | None = None,
    store: str = "",
) -> str:
    """Run a manifest from its first unfinished stage to its last.

    Args:
        manifest: Path of the YAML manifest, as the machine that runs the flow sees it.
        until: The last stage to run. Stages that the manifest leaves out are passed over.
        force: Stages to make anew although they are committed.
        overrides: Settings that replace the manifest's, one each, such as pretrain.steps=50
        store: Folder or URL of the outputs; empty for the default.
    """
    session = open_session(manifest, overrides or [], store or None, until=until)
    return _run(session, list(session.plan), frozenset(force or []))


@flow(name="gristmill-stage", flow_run_name="{stage} of {manifest}", persist_result=False, log_prints=False)
def gristmill_stage(
    manifest: str = "mixtures/demo.yaml",
    stage: StageName = "dedup",
    force: bool = True,
    overrides: list[str] | None = None,
    store: str = "",
) -> str:
    """Run one stage of a manifest; the stages before it must be committed.

    Args:
        manifest: Path of the YAML manifest, as the machine that runs the flow sees it.
        stage: The stage to run.
        force: Make it anew although it is committed.
        overrides: Settings that replace the manifest's, one each, such as pretrain.steps=50
        store: Folder or URL of the outputs; empty for the default.
    """
    session = open_session(manifest, overrides or [], store or None, until=stage, exactly=True)
    return _run(session, [stage], frozenset([stage]) if force else frozenset())


def _run(session: Session, stages: list[str], force: frozenset[str]) -> str:
    """Run stages as tasks, with the run's record beside them; returns the run's folder."""
    observer = PrefectObserver(observer_of_caller.get())
    runner = session.runner(observer)
    record = session.start_record()
    try:
        with record.until_end():
            for stage in stages:
                _task_for(stage)(runner, record, stage, stage in force)
    finally:
        observer.close()
        publish_run(session, record)
    return str(record.folder)


def _task_for(stage: str) -> Any:
    named: Any = run_stage.with_options(name=stage, task_run_name=stage, tags={f"stage:{stage}"})
    return named
