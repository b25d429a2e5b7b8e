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
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from gristmill.core.files import as_path
from gristmill.flows.pages.page_html import HEADERS, file_policy
from gristmill.flows.prefect.server_settings import server_password

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
    port: int, password: str, metrics: Callable[[], bytes]
) -> ThreadingHTTPServer:
    """Serve reports and metrics on a port of the loopback address, on a thread of its
    own, until `shutdown`.

    Args:
        port: to listen on.
        password: signs the links.
        metrics: makes the text for Prometheus.

    Raises:
        OSError: the port is taken.
    """
    server = ThreadingHTTPServer(
        ("127.0.0.1", port), partial(ReportHandler, password, metrics)
    )
    threading.Thread(target=server.serve_forever, daemon=True, name="reports").start()
    return server


class ReportHandler(BaseHTTPRequestHandler):
    """Answers `GET /SIGNATURE/PATH`, where PATH is a report's path, quoted, and `GET
    /SIGNATURE/metrics`.

    Args:
        password: signs the links.
        metrics: makes the text for Prometheus.
        arguments: of the base class.
    """

    def __init__(
        self, password: str, metrics: Callable[[], bytes], *arguments: Any
    ) -> None:
        self._password, self._metrics = password, metrics
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send a report or the metrics, 403 without their signature, or 404."""
        # Other host names that lead to this address belong to pages of other sites.
        host = (self.headers.get("Host") or "").partition(":")[0]
        if host not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        signed, _, quoted = urlsplit(self.path).path.removeprefix("/").partition("/")
        path = unquote(quoted)
        expected = signature(path, self._password)
        if not hmac.compare_digest(signed.encode(), expected.encode()):
            hint = "follow the link to a report from the page of its run"
            self.send_error(HTTPStatus.FORBIDDEN, hint)
            return
        if path == METRICS:
            headers = {"content-type": METRICS_TYPE}
            try:
                content: bytes | None = self._metrics()
            except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
                log.warning("no metrics: %s", error)
                status = HTTPStatus.SERVICE_UNAVAILABLE
                self.send_error(status, "the store cannot be read")
                return
        else:
            policy = f"{file_policy()}; frame-ancestors 'none'"
            headers = {**HEADERS, "content-security-policy": policy}
            headers["content-type"] = "text/html; charset=utf-8"
            content = read_report(path)
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND, "no such report")
            return
        self.send_response(HTTPStatus.OK)
        headers["content-length"] = str(len(content))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests to the terminal."""


def read_report(location: str) -> bytes | None:
    """The bytes of a run's report; None for every other file."""
    path = as_path(location)
    if path.name != "report.html" or ".." in path.parts:
        return None
    is_of_run = (path.parent / "run.json").exists() and path.exists()
    return path.read_bytes() if is_of_run else None
