"""Reports under an address that a browser opens, since pages from a server may not link
to files.

`gristmill up` serves them on the loopback address, beside Prefect. Every link is signed
with the password of the server, because all users of a machine reach its loopback
address. It serves `report.html` of folders of runs, and metrics of the runs for
Prometheus; nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from gristmill.core.files import as_path
from gristmill.flows.pages.page_html import HEADERS, file_policy
from gristmill.flows.prefect.server_settings import server_password

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request

METRICS = "metrics"
"""The path of the metrics after their signature."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""
log = logging.getLogger("gristmill.reports")
VARIABLE = "GRISTMILL_REPORTS_URL"
"""Environment variable with the address of the server of reports; `up` sets it for
runs.
"""


def report_link(report: Path) -> str | None:
    """The address of a run's report; None if no server of reports runs."""
    base = os.environ.get(VARIABLE)
    if not base:
        return None
    path = str(report) if "://" in str(report) else str(report.absolute())
    return f"{base.rstrip('/')}/{signature(path, server_password())}/{quote(path, safe='')}"


def metrics_link(base: str, password: str) -> str:
    """The address of the metrics for Prometheus, of the server at `base`."""
    return f"{base}/{signature(METRICS, password)}/{METRICS}"


def signature(path: str, password: str) -> str:
    """The part of a link that only this server's user can compute; always the same, as
    links outlast the server.
    """
    return hmac.new(password.encode(), path.encode(), hashlib.sha256).hexdigest()


def serve_reports(
    listening: socket.socket, password: str, metrics: Callable[[], bytes]
) -> uvicorn.Server:
    """Serve reports and metrics on a thread of its own, until `should_exit` of the
    server is set: `GET /SIGNATURE/PATH`, where PATH is a report's path, quoted, or
    `metrics`.

    Args:
        listening: socket on a port of the loopback address.
        password: signs the links.
        metrics: makes the text for Prometheus.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import Response
    from starlette.routing import Route

    def answer(request: Request) -> Response:
        signed, _, path = request.path_params["path"].partition("/")
        expected = signature(path, password)
        if not hmac.compare_digest(signed.encode(), expected.encode()):
            hint = "follow the link to a report from the page of its run"
            raise HTTPException(HTTPStatus.FORBIDDEN, hint)
        if path == METRICS:
            try:
                return Response(metrics(), media_type=METRICS_TYPE)
            except Exception as error:
                log.warning("no metrics: %s", error)
                status = HTTPStatus.SERVICE_UNAVAILABLE
                raise HTTPException(status, "the store cannot be read") from error
        content = read_report(path)
        if content is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "no such report")
        policy = f"{file_policy()}; frame-ancestors 'none'"
        headers = {**HEADERS, "content-security-policy": policy}
        return Response(content, headers=headers, media_type="text/html")

    # Other host names that lead to this address belong to pages of other sites.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    app = Starlette(routes=[Route("/{path:path}", answer)], middleware=[hosts])
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    sockets = {"sockets": [listening]}
    threading.Thread(
        target=server.run, kwargs=sockets, daemon=True, name="reports"
    ).start()
    return server


def read_report(location: str) -> bytes | None:
    """The bytes of a run's report; None for every other file."""
    path = as_path(location)
    if path.name != "report.html" or ".." in path.parts:
        return None
    is_of_run = (path.parent / "run.json").exists() and path.exists()
    return path.read_bytes() if is_of_run else None
