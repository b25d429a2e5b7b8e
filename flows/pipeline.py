"""Prefect flows: `gristmill` runs a manifest, `gristmill-stage` one stage of it. Each
stage is one task.

Prefect displays and triggers runs; the store skips, resumes and commits stages. A
tracking error never fails a stage.
"""

from __future__ import annotations

import contextvars
import signal
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed

from gristmill.core.secrets import mask_text
from gristmill.flows.orchestration.flow_liveness import (
    CANCELLED,
    is_being_cancelled,
    owned_run,
)
from gristmill.flows.orchestration.parameters import (
    DeploymentName,
    FilePath,
    RefusedError,
    Setting,
    StageName,
    refuse_secrets,
    run_name,
)
from gristmill.flows.orchestration.remote_stages import run_elsewhere
from gristmill.flows.orchestration.reporting import (
    PrefectObserver,
    failed,
    publish_run,
    publishing_refusal,
)
from gristmill.flows.report.prerender import prerenderer
from gristmill.flows.running.fork_server import ForkServer
from gristmill.flows.running.notify import notify
from gristmill.flows.running.observers import Observers
from gristmill.flows.running.run import (
    Observer,
    Runner,
    RunStoppedError,
    StageFailedError,
)
from gristmill.flows.running.schedule import jobs_of, run_jobs
from gristmill.flows.running.session import Session, open_session
from gristmill.flows.stages.registry import LAST

TRAINING_TAG = "gristmill-training"
"""Tag of training tasks. A server may limit how many of them run at a time (`gristmill
up` does).
"""
observer_of_caller: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
    "observer", default=None
)
"""Display of the terminal that called the flow, if any."""
server_of_caller: contextvars.ContextVar[ForkServer | None] = contextvars.ContextVar(
    "server", default=None
)
"""Fork server of that terminal."""
session_of_caller: contextvars.ContextVar[Session | None] = contextvars.ContextVar(
    "session", default=None
)
"""Session of that terminal; the parameters that Prefect records are masked."""


@dataclass(frozen=True)
class FlowContext:
    """Context of a flow's tasks. Not a task parameter: Prefect would infer a dependency
    between the tasks from it.
    """

    session: Session
    runner: Runner
    force: frozenset[str]


flow_context: contextvars.ContextVar[FlowContext] = contextvars.ContextVar(
    "flow_context"
)


@task(cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_stage(stage: str, workers: int) -> State:
    """Run one stage until its output is committed; the state's name is the outcome:
    Cached, Completed or Resumed.
    """
    context = flow_context.get()
    try:
        outcome = context.runner.run_stage(stage, stage in context.force, workers)
    except RunStoppedError:
        return _stopped()
    return Completed(
        name=outcome.how,
        data=outcome,
        message=mask_text(outcome.note or str(outcome.folder.path)),
    )


@task(cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_stage_elsewhere(stage: str, deployment: str) -> State:
    """Run a stage in another deployment, and report the output that it committed."""
    context = flow_context.get()
    force = stage in context.force
    try:
        if force or context.runner.folder(stage).state() != "committed":
            try:
                run_elsewhere(
                    context.session,
                    stage,
                    deployment,
                    force,
                    context.runner.processes.check,
                )
            except StageFailedError as error:
                context.runner.observer.stage_failed(
                    context.runner.plan[stage], mask_text(str(error))
                )
                raise
        outcome = context.runner.run_stage(stage)
    except RunStoppedError:
        return _stopped()
    return Completed(
        name=outcome.how,
        data=outcome,
        message=mask_text(f"by {deployment}: {outcome.folder.path}"),
    )


def _stopped() -> State:
    """Return the state of a task whose flow was stopped: cancelled on request,
    otherwise ended by the signal.
    """
    if not is_being_cancelled():
        raise TerminationSignal(signal.SIGTERM)
    return Cancelled(message=CANCELLED)


def name_of_run() -> str:
    """Return the name of the current run of `gristmill` or `gristmill-stage`."""
    parameters = flow_run.parameters
    name = run_name(parameters["manifest"], parameters.get("overrides", ()))
    return f"{parameters['stage']} of {name}" if "stage" in parameters else name


@flow(
    name="gristmill", flow_run_name=name_of_run, persist_result=False, log_prints=False
)
def gristmill(
    manifest: FilePath,
    until: StageName = LAST,
    force: tuple[StageName, ...] = (),
    overrides: tuple[Setting, ...] = (),
    store: str = "",
    training_deployment: DeploymentName = "",
) -> str | State:
    """Run a manifest from its first unfinished stage to its last.

    Args:
        manifest: Path of the YAML manifest, as the machine that runs the flow sees it.
        until: The last stage to run. Stages that the manifest leaves out are skipped.
        force: Stages to rebuild even if they are committed.
        overrides: Settings that replace the manifest's, one each, such as
            pretrain.steps=50
        store: Folder or URL of the outputs; empty for the default.
        training_deployment: Deployment that runs the training stages, such as
            gristmill-stage/gpu. It must see the same manifest and store. Empty to train
            on the machine of this run.
    """
    with owned_run():
        try:
            session = _open(manifest, overrides, store, until, exactly=False)
        except RefusedError as refusal:
            return failed(refusal)
        return _run(session, list(session.plan), frozenset(force), training_deployment)


@flow(
    name="gristmill-stage",
    flow_run_name=name_of_run,
    persist_result=False,
    log_prints=False,
)
def gristmill_stage(
    manifest: FilePath,
    stage: StageName,
    force: bool = True,
    overrides: tuple[Setting, ...] = (),
    store: str = "",
) -> str | State:
    """Run one stage of a manifest; the stages before it must be committed.

    Args:
        manifest: Path of the YAML manifest, as the machine that runs the flow sees it.
        stage: The stage to run.
        force: Rebuild the stage even if it is committed.
        overrides: Settings that replace the manifest's, one each, such as
            pretrain.steps=50
        store: Folder or URL of the outputs; empty for the default.
    """
    with owned_run():
        try:
            session = _open(manifest, overrides, store, stage, exactly=True)
        except RefusedError as refusal:
            return failed(refusal)
        return _run(session, [stage], frozenset([stage]) if force else frozenset())


def _open(
    manifest: str, overrides: tuple[str, ...], store: str, until: str, exactly: bool
) -> Session:
    """Open a manifest; if it is invalid, publish its problems in the run before the run
    fails.
    """
    opened = session_of_caller.get()
    if opened is not None:
        return opened
    with publishing_refusal(manifest):
        refuse_secrets({"overrides": list(overrides), "store": store})
        opened = open_session(
            manifest,
            list(overrides),
            store or None,
            until=until,
            exactly=exactly,
            allow_code=True,
        )
    return opened


def _run(
    session: Session,
    stages: list[str],
    force: frozenset[str],
    training_deployment: str = "",
) -> str:
    """Run stages as tasks that wait for their inputs, and return the folder of the
    run's record.
    """
    session.forget_kept(force)
    observer = PrefectObserver(observer_of_caller.get())
    record = session.start_record()
    caller_server = server_of_caller.get()
    server = (
        nullcontext(caller_server)
        if caller_server is not None
        else session.stage_server(stages, force)
    )
    futures: dict[str, Any] = {}
    prerender = prerenderer(session)

    def finish(stage: str, future: Any) -> None:
        future.result()
        prerender(stage)

    def start(stage: str, workers: int) -> Any:
        upstream = [
            futures[name] for name in session.plan[stage].inputs if name in futures
        ]
        trains = session.plan[stage].stage.requirements.torchrun
        tags = {f"stage:{stage}"}
        if training_deployment and trains:
            remote_task: Any = run_stage_elsewhere.with_options(
                name=stage, task_run_name=stage, tags=tags
            )
            futures[stage] = remote_task.submit(
                stage, training_deployment, wait_for=upstream
            )
        else:
            if trains:
                tags.add(TRAINING_TAG)
            local_task: Any = run_stage.with_options(
                name=stage, task_run_name=stage, tags=tags
            )
            futures[stage] = local_task.submit(stage, workers, wait_for=upstream)
        return futures[stage]

    try:
        with record.until_end(), server as fork_server:
            runner = session.runner(Observers(record, observer), fork_server)
            flow_context.set(FlowContext(session, runner, force))
            run_jobs(
                jobs_of(session.plan, stages, runner.engine),
                runner.engine.workers,
                start,
                finish,
                runner.processes.stop,
            )
    except CancelledRun:
        # The task was cancelled with its flow; the process that started the flow
        # decides how the run ends.
        raise TerminationSignal(signal.SIGTERM) from None
    finally:
        observer.close()
        notify(session, record, publish_run(session, record))
    return str(record.folder)
