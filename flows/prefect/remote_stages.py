"""Stages run by another deployment: on a machine with GPUs, by a worker of its own work
pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gristmill.flows.running.run import StageFailedError
from gristmill.flows.running.session import Session

POLL_SECONDS = 2.0


def run_elsewhere(
    session: Session,
    stage: str,
    deployment: str,
    force: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Start a run of a deployment of `gristmill-stage`, and wait for it.

    If this run is cancelled or ended, the other one is cancelled too.

    Args:
        session: its manifest and store have the same names on the other machine.
        stage: stage to run.
        deployment: `gristmill-stage/NAME`.
        force: rebuild a committed output.
        check: raises if this run was stopped.

    Raises:
        StageFailedError: the deployment does not exist, or its run did not complete.
    """
    from prefect.client.orchestration import get_client
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Cancelling

    parameters = {
        "manifest": session.manifest_file,
        "stage": stage,
        "force": force,
        "overrides": session.overrides,
        "store": session.store_option or "",
    }
    try:
        run: Any = run_deployment(deployment, parameters=parameters, timeout=0)
    except ObjectNotFound as error:
        raise StageFailedError(
            f"{stage}: there is no deployment {deployment}; register it with: "
            "prefect deploy --all"
            " (deploy/README.md), or leave training_deployment empty to train here"
        ) from error
    state = None
    try:
        while state is None or not state.is_final():
            time.sleep(POLL_SECONDS)
            check()
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(run.id).state
    finally:
        if state is None or not state.is_final():
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(run.id, Cancelling())
    if not state.is_completed():
        raise StageFailedError(
            f"{stage}: the run {run.name} of {deployment} ended "
            f"as {state.name}: {state.message}"
        )
