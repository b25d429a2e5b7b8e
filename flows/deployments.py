"""The deployments in Prefect's UI, and the process that runs what is triggered there.

A deployment per manifest offers that manifest's own stages; one of each flow takes any manifest.
"""

from __future__ import annotations

import asyncio
import fcntl
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from prefect.runner import Runner

from gristmill.flows.pipeline import gristmill, gristmill_stage
from gristmill.flows.server_password import prefect_folder
from gristmill.flows.sweeps.pipeline import gristmill_sweep

TAG = "gristmill"
ANY = "any-manifest"
"""Name of the deployments that take the path of a manifest."""
LOCK = "gristmill-serving.lock"


def make_deployments() -> list[Any]:
    """What `gristmill up` and `gristmill serve` offer."""
    return [flow.to_deployment(ANY, tags=[TAG]) for flow in (gristmill, gristmill_stage, gristmill_sweep)]


def run_triggered(deployments: Sequence[Any], limit: int) -> None:
    """Register deployments and run what is triggered, until SIGTERM or SIGINT.

    Args:
        deployments: as `make_deployments` makes them.
        limit: flow runs at the same time.
    """
    # Of a parent in the background of a shell it is inherited as ignored; asyncio takes it for the end only if it is not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path = prefect_folder() / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        runner = DeploymentRunner(lock, limit)
        for deployment in deployments:
            runner.add_deployment(deployment)
        try:
            asyncio.run(runner.start())
        except KeyboardInterrupt:
            return


class DeploymentRunner(Runner):
    """Prefect's runner, which ends in order, and leaves the deployments on while another process serves them.

    Args:
        lock: a file that every serving process of this user has locked, shared.
        limit: flow runs at the same time.
    """

    def __init__(self, lock: IO[str], limit: int) -> None:
        super().__init__(limit=limit)
        self._lock = lock

    def handle_sigterm(self, *_: Any, **__: Any) -> None:
        """End like at SIGINT: Prefect's own way makes a coroutine that nobody awaits (3.8.8)."""
        signal.raise_signal(signal.SIGINT)

    async def __aexit__(self, *exc_info: Any) -> None:
        self.pause_on_shutdown = _is_last(self._lock)
        await super().__aexit__(*exc_info)


def _is_last(lock: IO[str]) -> bool:
    """Whether no other process has the file locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
