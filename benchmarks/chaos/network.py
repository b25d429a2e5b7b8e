"""Servers that are slow, fail or go away: a network in front of an object store, and a Prefect API that is none."""

from __future__ import annotations

import http.client
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

FAIL_EVERY = 7
"""One in so many requests is spoilt, by turns with an error 503 and with a connection that is cut."""
REFUSE_SECONDS = 60.0
"""For so long a store refuses everything."""
INTERNAL_ERROR = b"<Error><Code>InternalError</Code></Error>"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Ending(ThreadingHTTPServer):
    """A server of this machine that can be ended while requests wait.

    Attributes:
        lock: of what it counts.
        done: set when it ends.
    """

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.lock = threading.Lock()
        self.done = threading.Event()


class Network(Ending):
    """Hands requests on to a server of this machine; `fault` says which of them are spoilt, and how.

    Attributes:
        delay_seconds: how long each request waits.
        is_faulty: whether some requests are spoilt.
        away_from: the request from which on every connection is cut; None for never.
        refuses_from: the request from which on all are refused with 503 for REFUSE_SECONDS; None for never.
        refused: how many were.
        requests: how many there were.
        received, sent: bytes of what was asked, and of the answers.
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
        """Its URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, method: str, path: str) -> str | None:
        """What happens to the next request: `cut` (the connection), `hang`, `short` or `flip` (the answer), the number
        of an HTTP status, or nothing.
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
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Network

    def handle_request(self) -> None:
        """Hand a request on, or spoil it."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.path)
        time.sleep(self.server.delay_seconds)
        if fault == "cut":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if fault == "hang":
            self.server.done.wait(60)
            self.close_connection = True
            return
        status, headers, content = (
            self._ask(body)
            if fault is None or not fault.isdecimal()
            else (int(fault), [], b"" if self.command == "HEAD" else INTERNAL_ERROR)
        )
        with self.server.lock:
            self.server.received += len(body)
            self.server.sent += len(content)
        if fault == "flip":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(content)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        if fault == "short":
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            upstream.close()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


SomeServer = TypeVar("SomeServer", bound=Ending)


@contextmanager
def serving(server: SomeServer) -> Iterator[SomeServer]:
    """A server that answers."""
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.done.set()
            server.shutdown()


@contextmanager
def object_store(bucket: str) -> Iterator[int]:
    """An S3-compatible server in this process, with a bucket; yields its port.

    Raises:
        ImportError: moto or s3fs is not installed.
    """
    import s3fs  # type: ignore[import-untyped]  # noqa: F401 - what the runs reach it with
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # which would print a line for every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{bucket}")
        connection.getresponse().read()
        connection.close()
        yield port
    finally:
        server.stop()


@contextmanager
def silent_server() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/api"


def unused_address() -> str:
    """The URL of a server that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    return f"http://127.0.0.1:{port}/api"
