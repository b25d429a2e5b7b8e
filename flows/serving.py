"""The deployments in Prefect's browser UI: the whole flow, and any single stage."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import Any, cast

from gristmill.dataprep.processes import end_with_parent
from gristmill.flows.tracking import LOCAL_API, answers, apply_default_settings, find_api

SERVER_START_SECONDS = 120.0
POLL_SECONDS = 0.5
END_SECONDS = 20.0


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

    Both are processes of their own, so that an interrupt of this one ends them in order, whatever they are doing.

    Raises:
        NoServerError: the server did not answer in time, or one of the two ended by itself.
    """
    apply_default_settings(quiet_console=False)
    api = f"http://127.0.0.1:{port}/api"
    os.environ["PREFECT_API_URL"] = api
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    children: list[subprocess.Popen[bytes]] = []
    try:
        if not answers(api):
            children.append(start_child("server", port, {"PREFECT_UI_API_URL": "/api"}, subprocess.DEVNULL))
        if not wait_for_answer(api, children, stopping):
            return
        print(f"Prefect: http://127.0.0.1:{port}", flush=True)
        children.append(start_child("deployments", limit, {}, None))
        while not stopping.wait(POLL_SECONDS):
            check_children(children)
    finally:
        for child in reversed(children):
            end_child(child)


def start_child(role: str, number: int, environment: dict[str, str], output: int | None) -> subprocess.Popen[bytes]:
    """Start this module as `server PORT` or `deployments LIMIT`, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "gristmill.flows.serving", role, str(number)], stdin=subprocess.DEVNULL, stdout=output,
        env={**os.environ, **environment}, start_new_session=True,
    )


def end_child(child: subprocess.Popen[bytes]) -> None:
    """End a child's process group: ask, wait, insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(END_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def check_children(children: list[subprocess.Popen[bytes]]) -> None:
    """Raise NoServerError if one of them has ended."""
    for child in children:
        if child.poll() is not None:
            raise NoServerError(f"{shlex.join(cast(list[str], child.args)[-3:])} ended with code {child.returncode}; "
                                "start again with: gristmill up")


def wait_for_answer(api: str, children: list[subprocess.Popen[bytes]], stopping: threading.Event) -> bool:
    """Wait until the server answers; False if this process is asked to stop first."""
    deadline = time.monotonic() + SERVER_START_SECONDS
    while not answers(api):
        check_children(children)
        if time.monotonic() > deadline:
            raise NoServerError(f"the Prefect server did not answer at {api} within {SERVER_START_SECONDS:.0f} s")
        if stopping.wait(POLL_SECONDS):
            return False
    return not stopping.is_set()


def main(role: str, number: int) -> None:
    """What the children of `up` do, until they or their parent end."""
    end_with_parent(signal.SIGTERM)
    if role == "deployments":
        serve_deployments(number)
        return
    os.execv(sys.executable, [
        sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(number)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
