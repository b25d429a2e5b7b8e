"""A proxy in front of an object store that fails on a test's request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from urllib.parse import unquote

from benchmarks.chaos.network import Network
from benchmarks.store_servers import StoreServer
from gristmill.core.files import as_path

BUCKET = "shelf"


class Outage(Network):
    """A proxy that fails a number of consecutive requests and then works again.

    Attributes:
        url: of the bucket.
        refusals: number of requests that are still to fail.
        begins_with: failures start at the first request whose path contains this text.
        how: kind of failure (`Network.fault`).
        refused: number of failed requests.
        asked: method and path of every request.
    """

    def __init__(self, server: StoreServer) -> None:
        super().__init__(server.port)
        self.url = server.url
        self.refusals, self.begins_with, self.how, self.refused = 0, "", "503", 0
        self.asked: list[str] = []

    def fault(self, method: str, path: str) -> str | None:
        """Return the fault of the next request, if any."""
        with self.lock:
            self.asked.append(f"{method} {path}")
            if self.begins_with in unquote(path):
                self.begins_with = ""
            if self.begins_with or not self.refusals:
                return None
            self.refusals -= 1
            self.refused += 1
            return self.how


@contextmanager
def store_clients(server: StoreServer, address: str) -> Iterator[None]:
    """Let the clients of this process, and of those that it starts, ask a store at an
    address, which its server or a proxy has.
    """
    with patch.dict(os.environ, server.environment(address)):
        clients = type(as_path(server.url).fs)  # type: ignore[attr-defined]
        clients.clear_instance_cache()
        yield
        clients.clear_instance_cache()
