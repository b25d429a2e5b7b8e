"""Supervision of Prefect's server and the deployments' runner."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gristmill.core.processes import end_session, end_with_parent
from gristmill.core.secrets import mask_text
from gristmill.core.store import Store
from gristmill.flows.prefect.choose_prefect import (
    LOCAL_API,
    answers,
    apply_default_settings,
    find_api,
    is_ready,
)
from gristmill.flows.prefect.run_metrics import metrics_text
from gristmill.flows.prefect.server_settings import (
    CLIENT_VARIABLE,
    ORIGINS_VARIABLE,
    SERVER_VARIABLE,
    admits,
    is_admitted,
    keep_private,
    server_password,
)
from gristmill.flows.prefect.sign_in import (
    PAGES_VARIABLE,
    add_sign_in_page,
    deployments_page,
    how_to_open,
    pages_folder,
    pages_of,
)
from gristmill.flows.report.server import VARIABLE, metrics_link, serve_reports

if TYPE_CHECKING:
    import uvicorn

DATABASE_VARIABLE = "PREFECT_API_DATABASE_CONNECTION_URL"
LEASES_VARIABLE = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
"""Where the server keeps who has a slot of a concurrency limit. In its memory, a slot of
a killed training would stay taken after a restart, and all later ones would wait.
"""
SERVER_START_SECONDS = 120.0
POLL_SECONDS = 0.5
END_SECONDS = 30.0
"""Time for the stages of running flows to write their checkpoints, and to be marked as
crashed.
"""
RUN_END_SECONDS = 22.0


class NoServerError(LookupError):
    """No Prefect server to register with, or one that rejects the password."""


class ServerFailedError(RuntimeError):
    """The server of `up` does not answer, or a child process has ended."""


class OpenServerError(ValueError):
    """A server without a password, which any web page that its users open can
    control.
    """


class PortTakenError(ValueError):
    """A port of `up` is in use."""


def serve_deployments(
    limit: int, manifests: Sequence[str], allow_open_server: bool = False
) -> None:
    """Register the deployments, and run triggered flows until this process ends; its
    runs then end as crashed.

    Args:
        limit: maximum number of concurrent flow runs.
        manifests: manifests with separate deployments; those of the current folder
            by default.
        allow_open_server: accept a server without a password.

    Raises:
        NoServerError: no Prefect server answers, or it needs an unknown password.
        OpenServerError: the server has no password.
    """
    apply_default_settings(quiet_console=False)
    api = find_api() or LOCAL_API
    if not answers(api):
        raise NoServerError(
            f"no Prefect server answers at {api}; start one together "
            "with this: gristmill up"
        )
    check_password(api, allow_open_server)
    from gristmill.flows.prefect.deployments import (
        ManifestOnOffer,
        find_manifests,
        make_deployments,
        run_triggered,
    )
    from gristmill.flows.prefect.flow import TRAINING_TAG
    from gristmill.flows.prefect.flow_liveness import end_runs_of, keep_marking

    limit_trainings(TRAINING_TAG)
    keep_marking()
    manifest_files = [Path(manifest) for manifest in manifests] or find_manifests(
        Path.cwd()
    )
    deployments = make_deployments([ManifestOnOffer(path) for path in manifest_files])
    names = ", ".join(
        f"{deployment.flow_name}/{deployment.name}" for deployment in deployments
    )
    print(f"Deployments {names}: {deployments_page(api)}", flush=True)
    try:
        run_triggered(deployments, limit)
    finally:
        end_runs_of(os.getpid(), RUN_END_SECONDS)


def check_password(api: str, allow_open_server: bool) -> None:
    """Raise NoServerError or OpenServerError unless a server requires a password and
    accepts the configured one.
    """
    if admits(api, None):
        if allow_open_server:
            return
        raise OpenServerError(
            f"the Prefect server at {api} requires no password: any web page that a "
            "browser opens here could run commands. Start it with "
            f"{SERVER_VARIABLE}=USER:PASSWORD and this with "
            f"{CLIENT_VARIABLE}=USER:PASSWORD, or use gristmill up instead of both; if "
            "no browser can reach it, add --allow-open-server"
        )
    if not is_admitted(api):
        raise NoServerError(
            f"the Prefect server at {api} rejects the password of this process; set "
            f"{CLIENT_VARIABLE}=USER:PASSWORD to the server's"
        )


def limit_trainings(tag: str) -> None:
    """Limit trainings to one at a time, unless Prefect has another limit for this
    tag.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_concurrency_limit_by_tag(tag)
        except ObjectNotFound:
            client.create_concurrency_limit(tag, 1)


def up_and_serve(
    port: int,
    limit: int,
    store: Store,
    manifests: Sequence[str],
) -> None:
    """Start a Prefect server on the loopback address, and serve deployments, reports
    and metrics.

    The first two are separate processes, so that an interrupt of this one ends them in
    order at any time. Reports use the port after the server's, so that links to them
    outlast this process.

    Args:
        port: port of the server.
        limit: maximum number of concurrent flow runs.
        store: store of the runs in the metrics.
        manifests: see `serve_deployments`.

    Raises:
        PortTakenError: a port is in use.
        ServerFailedError: the server did not answer in time, or a child process has
            ended.
    """
    apply_default_settings(quiet_console=False)
    api = f"http://127.0.0.1:{port}/api"
    password = server_password()
    reports = take_ports(port, password, partial(metrics_text, store))
    # The flows' processes inherit this environment, and do not need the database's
    # password.
    database = os.environ.pop(DATABASE_VARIABLE, None)
    os.environ.update(
        {
            "PREFECT_API_URL": api,
            "PREFECT_UI_URL": pages_of(api),
            CLIENT_VARIABLE: password,
        }
    )
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    children: list[subprocess.Popen[bytes]] = []
    try:
        environment = {
            "PREFECT_UI_API_URL": "/api",
            PAGES_VARIABLE: str(pages_folder()),
            SERVER_VARIABLE: password,
            ORIGINS_VARIABLE: f"http://127.0.0.1:{port},http://localhost:{port}",
            LEASES_VARIABLE: "prefect.server.concurrency.lease_storage.filesystem",
        }
        if database is not None:
            environment[DATABASE_VARIABLE] = database
        children.append(
            start_child("server", port, environment, subprocess.DEVNULL, ())
        )
        if not wait_for_answer(api, children, stopping):
            return
        add_sign_in_page()
        address = metrics_link(f"http://127.0.0.1:{port + 1}", password)
        metrics = (
            "Metrics for Prometheus, of the runs in "
            f"{mask_text(str(store.root))}: {address}"
        )
        print(*how_to_open(port, password), metrics, sep="\n", flush=True)
        links = {VARIABLE: f"http://127.0.0.1:{port + 1}"}
        children.append(start_child("deployments", limit, links, None, manifests))
        while not stopping.wait(POLL_SECONDS):
            check_children(children)
    finally:
        for child in reversed(children):
            end_session(child, END_SECONDS)
        reports.should_exit = True


def take_ports(
    port: int, password: str, metrics: Callable[[], bytes]
) -> uvicorn.Server:
    """Serve reports and metrics at the port after the server's, after checking that the
    server's port is free.

    Two `up` of one port cannot both pass this, however close their starts.

    Args:
        port: port of Prefect's server.
        password: password of Prefect's server, which signs links to reports.
        metrics: function that returns the text for Prometheus.

    Raises:
        PortTakenError: a port is in use.
    """
    number = port
    try:
        socket.create_server(("127.0.0.1", number)).close()
        number = port + 1
        listening = socket.create_server(("127.0.0.1", number))
    except OSError as error:
        raise PortTakenError(
            f"port {number} is in use, perhaps by another gristmill up: open "
            f"http://127.0.0.1:{port}, or choose another --port"
        ) from error
    return serve_reports(listening, password, metrics)


def start_child(
    role: str,
    number: int,
    environment: dict[str, str],
    output: int | None,
    arguments: Sequence[str],
) -> subprocess.Popen[bytes]:
    """Start this module as `server PORT PARENT` or `deployments LIMIT PARENT
    MANIFEST...`, in a new session.
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gristmill.flows.prefect.serving",
            role,
            str(number),
            str(os.getpid()),
            *arguments,
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def check_children(children: list[subprocess.Popen[bytes]]) -> None:
    """Raise ServerFailedError if a child has ended."""
    for child in children:
        if child.poll() is not None:
            raise ServerFailedError(
                f"{shlex.join(cast(list[str], child.args)[2:])} ended with code "
                f"{child.returncode}; start again with: gristmill up"
            )


def wait_for_answer(
    api: str, children: list[subprocess.Popen[bytes]], stopping: threading.Event
) -> bool:
    """Wait until the server answers; False if this process is stopped first."""
    deadline = time.monotonic() + SERVER_START_SECONDS
    while not is_ready(api):
        check_children(children)
        if time.monotonic() > deadline:
            raise ServerFailedError(
                f"the Prefect server did not answer at {api} within "
                f"{SERVER_START_SECONDS:.0f} s"
            )
        if stopping.wait(POLL_SECONDS):
            return False
    return not stopping.is_set()


def main(role: str, number: int, parent: int, manifests: Sequence[str] = ()) -> None:
    """Run a child of `up` until it ends, or its parent ends or has already ended."""
    end_with_parent(signal.SIGTERM, parent)
    if role == "deployments":
        serve_deployments(number, manifests)
        return
    keep_private()
    os.execv(
        sys.executable,
        [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(number),
        ],
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
