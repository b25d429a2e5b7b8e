"""A proxy in front of an S3-compatible server that fails on a test's request."""

from __future__ import annotations

from benchmarks.chaos.network import Network

BUCKET = "shelf"


class Outage(Network):
    """A proxy that fails a number of consecutive requests and then works again.

    Attributes:
        refusals: number of requests that are still to fail.
        begins_with: failures start at the first request whose path contains this text.
        how: kind of failure (`Network.fault`).
        refused: number of failed requests.
        asked: method and path of every request.
    """

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.refusals, self.begins_with, self.how, self.refused = 0, "", "503", 0
        self.asked: list[str] = []

    def fault(self, method: str, path: str) -> str | None:
        """Return the fault of the next request, if any."""
        with self.lock:
            self.asked.append(f"{method} {path}")
            if self.begins_with in path:
                self.begins_with = ""
            if self.begins_with or not self.refusals:
                return None
            self.refusals -= 1
            self.refused += 1
            return self.how
