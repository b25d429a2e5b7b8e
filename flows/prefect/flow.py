"""Prefect flows: `gristmill` runs a manifest, `gristmill-stage` one stage of it. Each
stage is one task.

Prefect displays and triggers runs; the store skips, resumes and commits stages. A
tracking error never fails a stage.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

from prefect import Flow, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed

from gristmill.core.files import as_path
from gristmill.core.secrets import mask_secrets, mask_text
from gristmill.flows.prefect.flow_liveness import (
    CANCELLED,
    is_being_cancelled,
    mark_crashed_quietly,
    owned_run,
    show_cancelled,
)
from gristmill.flows.prefect.parameters import (
    DeploymentName,
    FilePath,
    RefusedError,
    Setting,
    StageName,
    refuse_secrets,
    run_name,
)
from gristmill.flows.prefect.prefect_progress import PrefectObserver
from gristmill.flows.prefect.remote_stages import run_elsewhere
from gristmill.flows.prefect.reporting import (
    failed,
    publish_run,
    publishing_refusal,
)
from gristmill.flows.running.events import StageFailed
from gristmill.flows.running.recorded_run import RunRequest, run_recorded
from gristmill.flows.running.run import Runner, RunStoppedError, StageFailedError
from gristmill.flows.running.session import open_session
from gristmill.flows.stages.registry import LAST

TRAINING_TAG = "gristmill-training"
"""Tag of training tasks. A server may limit how many of them run at a time (`gristmill
up` does).
"""


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
    return _run_opened(
        manifest, overrides, store, until, force, False, training_deployment
    )


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
    forced = (stage,) if force else ()
    return _run_opened(manifest, overrides, store, stage, forced, exactly=True)


def _run_opened(
    manifest: str,
    overrides: tuple[str, ...],
    store: str,
    until: str,
    force: Sequence[str],
    exactly: bool,
    training_deployment: str = "",
) -> str | State:
    """Open a manifest and run its stages up to one, or exactly that one.

    The problems of an invalid manifest are published in the run before it fails.
    """
    forced = frozenset(force)
    with owned_run():
        try:
            with publishing_refusal(manifest):
                refuse_secrets(overrides, store)
                session = open_session(
                    manifest,
                    list(overrides),
                    store or None,
                    until=until,
                    exactly=exactly,
                    allow_code=True,
                )
        except RefusedError as refusal:
            return failed(refusal)
        stages = [until] if exactly else list(session.plan)
        session.forget_kept(forced)
        with session.stage_server(stages, forced) as server:
            request = RunRequest(session, stages, forced, (), server)
            return _run(request, training_deployment)


def run_in_flow(request: RunRequest) -> Path:
    """`run_recorded` in a flow run of this process.

    Prefect shows the flow's parameters to every user of the server, so they are masked.
    """
    session, stages, force = request.session, request.stages, request.force
    mark_crashed_quietly()
    masked = mask_secrets(
        {"overrides": session.overrides, "store": session.store_option or ""}
    )
    parameters: dict[str, Any] = {
        "manifest": session.manifest_file,
        "overrides": tuple(masked["overrides"]),
        "store": masked["store"],
    }
    shown_flow: Flow[..., Any] = gristmill
    if len(stages) == 1 and list(session.plan) != stages:
        shown_flow = gristmill_stage
        parameters |= {"stage": stages[0], "force": bool(force)}
    else:
        parameters |= {"until": list(session.plan)[-1], "force": tuple(sorted(force))}

    # Replaces the flow's own function: what the parameters name is open already.
    @wraps(shown_flow.fn)
    def run(*args: object, **kwargs: object) -> str:
        with owned_run():
            return _run(request)

    replaced = shown_flow.with_options(validate_parameters=False)
    replaced.fn = run
    try:
        return as_path(replaced(**parameters))
    finally:
        show_cancelled()


def _run(request: RunRequest, training_deployment: str = "") -> str:
    """Run stages as tasks that wait for their inputs, and return the folder of the
    run's record.
    """
    session, force = request.session, request.force
    futures: dict[str, PrefectFuture[Any]] = {}

    def start(runner: Runner, stage: str, workers: int) -> PrefectFuture[Any]:
        node = session.plan[stage]
        tags = {f"stage:{stage}"}
        deployment = ""
        if node.stage.torchrun:
            deployment = training_deployment
            if not deployment:
                tags.add(TRAINING_TAG)

        @task(
            name=stage,
            task_run_name=stage,
            tags=tags,
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=0,
        )
        def run_stage() -> State:
            try:
                if deployment:
                    return _run_elsewhere(runner, stage, deployment, force)
                outcome = runner.run_stage(stage, stage in force, workers)
            except RunStoppedError:
                # cancelled on request, otherwise ended by the signal
                if not is_being_cancelled():
                    raise TerminationSignal(signal.SIGTERM) from None
                return Cancelled(message=CANCELLED)
            message = mask_text(outcome.note or str(outcome.folder.path))
            return Completed(name=outcome.how, data=outcome, message=message)

        upstream = [futures[name] for name in node.inputs if name in futures]
        futures[stage] = run_stage.submit(return_state=False, wait_for=upstream)
        return futures[stage]

    windows = (PrefectObserver(), partial(publish_run, session))
    shown = replace(request, subscribers=[*request.subscribers, *windows])
    try:
        return str(run_recorded(shown, start))
    except CancelledRun:
        # The task was cancelled with its flow; the process that started the flow
        # decides how the run ends.
        raise TerminationSignal(signal.SIGTERM) from None


def _run_elsewhere(
    runner: Runner,
    stage: str,
    deployment: str,
    force: frozenset[str],
) -> State:
    """Run a stage in another deployment, and return a state with the output that it
    committed; the state's name is the outcome.
    """
    if stage in force or runner.folder(stage).state() != "committed":
        try:
            run_elsewhere(
                runner.session,
                stage,
                deployment,
                stage in force,
                runner.processes.check,
            )
        except StageFailedError as error:
            runner.emit(StageFailed(runner.session.plan[stage], mask_text(str(error))))
            raise
    outcome = runner.run_stage(stage)
    message = mask_text(f"by {deployment}: {outcome.folder.path}")
    return Completed(name=outcome.how, data=outcome, message=message)
