"""Servers that are slow, fail or go away: a network in front of an object store, and
stand-ins for Prefect's API.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

FAIL_EVERY = 7
"""Interval of failing requests, alternately with an error 503 and with a cut
connection.
"""
REFUSE_SECONDS = 60.0
"""Time for which a store refuses all requests."""
INTERNAL_ERROR = b"<Error><Code>InternalError</Code></Error>"


class Ending(ThreadingHTTPServer):
    """Server of this machine that can be ended while requests wait.

    Attributes:
        lock: of its counts.
        done: set when it ends.
    """

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.lock = threading.Lock()
        self.done = threading.Event()


class Network(Ending):
    """Proxy of a server of this machine; `fault` decides which requests fail, and how.

    Attributes:
        delay_seconds: delay of each request.
        is_faulty: True if some requests fail.
        away_from: request from which on every connection is cut; None for never.
        refuses_from: request from which on all are refused with 503 for REFUSE_SECONDS;
            None for never.
        refused: number of refused requests.
        requests: number of requests.
        received, sent: bytes of requests and of answers.
    """

    def __init__(self, upstream: int) -> None:
        super().__init__(Handler)
        self.upstream, self.requests, self.received, self.sent = upstream, 0, 0, 0
        self.delay_seconds, self.is_faulty = 0.0, False
        self.away_from: int | None = None
        self.refuses_from: int | None = None
        self.refused, self._well_again = 0, 0.0

    @property
    def address(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, method: str, path: str) -> str | None:
        """Return the fault of the next request: `cut` (the connection), `lost`, `short`
        or `flip` (the answer), `hang`, the number of an HTTP status, or None.
        """
        with self.lock:
            self.requests += 1
            if self.away_from is not None and self.requests >= self.away_from:
                return "cut"
            if self.refuses_from is not None and self.requests >= self.refuses_from:
                self._well_again = self._well_again or time.monotonic() + REFUSE_SECONDS
                if time.monotonic() < self._well_again:
                    self.refused += 1
                    return "503"
            if not self.is_faulty or self.requests % FAIL_EVERY:
                return None
            return "503" if self.requests % (2 * FAIL_EVERY) else "cut"


class Handler(BaseHTTPRequestHandler):
    """Handler of a connection."""

    protocol_version = "HTTP/1.1"
    server: Network

    def handle_request(self) -> None:
        """Pass a request on, or let it fail."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.path)
        time.sleep(self.server.delay_seconds)
        if fault == "lost":
            self._ask(body)
        if fault in ("cut", "lost"):
            self.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            self.close_connection = True
            self.connection.close()
            return
        if fault == "hang":
            self.server.done.wait(60)
            self.close_connection = True
            return
        status, headers, content = (
            0,
            list[tuple[str, str]](),
            b"" if self.command == "HEAD" else INTERNAL_ERROR,
        )
        if fault is None or not fault.isdecimal():
            status, headers, content = self._ask(body)
        else:
            status = int(fault)
        with self.server.lock:
            self.server.received += len(body)
            self.server.sent += len(content)
        if fault == "flip":
            middle = len(content) // 2
            content = (
                content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            )
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in (
                "content-length",
                "transfer-encoding",
                "connection",
                "date",
                "server",
            ):
                self.send_header(name, value)
        length = next(
            (value for name, value in headers if name.lower() == "content-length"),
            str(len(content)),
        )
        self.send_header(
            "Content-Length", length if self.command == "HEAD" else str(len(content))
        )
        self.end_headers()
        if fault == "short":
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(
            "127.0.0.1", self.server.upstream, timeout=60
        )
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            upstream.close()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


SomeServer = TypeVar("SomeServer", bound=Ending)


@contextmanager
def serving(server: SomeServer) -> Iterator[SomeServer]:
    """Serve until the context ends."""
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.done.set()
            server.shutdown()


@contextmanager
def silent_server() -> Iterator[str]:
    """Listen for connections, and never answer; yields the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/api"


def unused_address() -> str:
    """Return a URL without a server."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    return f"http://127.0.0.1:{port}/api"
