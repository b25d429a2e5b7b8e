"""Reports under an address that a browser opens: pages from a server may not link to files.

`gristmill up` serves them on the loopback address, beside Prefect. Nothing is served but `report.html` of a folder
that is a run's.
"""

from __future__ import annotations

import os
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from gristmill.dataprep.files import as_path
from gristmill.flows.report.parts import content_policy

VARIABLE = "GRISTMILL_REPORTS_URL"
"""Where runs find the address of the server of reports; `up` sets it."""


def report_link(report: Path) -> str | None:
    """The address of a run's report; None where nobody serves reports."""
    base = os.environ.get(VARIABLE)
    if not base:
        return None
    path = str(report) if "://" in str(report) else str(report.absolute())
    return f"{base.rstrip('/')}/{quote(path, safe='')}"


def serve_reports(port: int) -> ThreadingHTTPServer:
    """Serve reports on a port of the loopback address, on a thread of its own, until `shutdown`.

    Raises:
        OSError: the port is taken.
    """
    server = ThreadingHTTPServer(("127.0.0.1", port), ReportHandler)
    threading.Thread(target=server.serve_forever, daemon=True, name="reports").start()
    return server


class ReportHandler(BaseHTTPRequestHandler):
    """Answers `GET /PATH`, where PATH is a report's path, quoted."""

    def do_GET(self) -> None:
        """Send a report, or 404."""
        # Other names that lead to this address belong to pages that have no business here.
        if (self.headers.get("Host") or "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        content = read_report(unquote(urlsplit(self.path).path.removeprefix("/")))
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND, "no such report")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        # Reports hold text of strangers: it stays text, whatever it contains, and no other page may show or load it.
        self.send_header("Content-Security-Policy", f"{content_policy()}; frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal for what matters."""


def read_report(location: str) -> bytes | None:
    """The bytes of a run's report; None for everything else."""
    path = as_path(location)
    if path.name != "report.html" or ".." in path.parts or not (path.parent / "run.json").exists():
        return None
    return path.read_bytes() if path.exists() else None
