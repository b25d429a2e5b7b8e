"""The deployments in Prefect's browser UI: the whole flow, and any single stage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any, NoReturn

from gristmill.dataprep.processes import end_with_parent
from gristmill.flows.tracking import LOCAL_API, answers, apply_default_settings, find_api

SERVER_START_SECONDS = 120.0
POLL_SECONDS = 0.5


class NoServerError(RuntimeError):
    """There is no Prefect server to register at."""


def serve_deployments(limit: int) -> None:
    """Register `gristmill/local` and `gristmill-stage/local`, and run what is triggered until this process ends.

    Args:
        limit: flow runs at the same time.

    Raises:
        NoServerError: no Prefect server answers.
    """
    apply_default_settings(quiet_console=False)
    api = find_api() or LOCAL_API
    if not answers(api):
        raise NoServerError(f"no Prefect server answers at {api}; start one together with this: gristmill up")
    from prefect import serve

    from gristmill.flows.pipeline import gristmill, gristmill_stage

    deployments: list[Any] = [deployed.to_deployment("local", tags=["gristmill"])
                              for deployed in (gristmill, gristmill_stage)]
    print(f"Deployments gristmill/local and gristmill-stage/local: {api.removesuffix('/api')}/deployments", flush=True)
    serve(*deployments, limit=limit, print_starting_message=False)


def up_and_serve(port: int, limit: int) -> None:
    """Start a Prefect server on the loopback address unless one answers there, and serve the deployments.

    Raises:
        NoServerError: the server did not answer in time.
    """
    apply_default_settings(quiet_console=False)
    api = f"http://127.0.0.1:{port}/api"
    os.environ["PREFECT_API_URL"] = api
    server: subprocess.Popen[bytes] | None = None
    if not answers(api):
        server = subprocess.Popen(
            [sys.executable, "-m", "gristmill.flows.serving", str(port)], stdout=subprocess.DEVNULL,
            env={**os.environ, "PREFECT_UI_API_URL": "/api"}, start_new_session=True,
        )
    # Until Prefect's runner handles the signal itself, it must not end this process before the server.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _wait_until_up(api, server)
        print(f"Prefect: http://127.0.0.1:{port}", flush=True)
        serve_deployments(limit)
    except KeyboardInterrupt:
        return
    finally:
        if server is not None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def become_server(port: int) -> NoReturn:
    """Turn this process into a Prefect server on the loopback address that ends with its parent."""
    end_with_parent(signal.SIGTERM)
    os.execv(sys.executable, [
        sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)])


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _wait_until_up(api: str, server: subprocess.Popen[bytes] | None) -> None:
    deadline = time.monotonic() + SERVER_START_SECONDS
    while not answers(api):
        if server is not None and server.poll() is not None:
            raise NoServerError(f"the Prefect server ended with code {server.returncode}; see: prefect server start")
        if time.monotonic() > deadline:
            raise NoServerError(f"the Prefect server did not answer at {api} within {SERVER_START_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    become_server(int(sys.argv[1]))
