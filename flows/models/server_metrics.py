"""What a served model counts, as Prometheus reads it: requests, answers at work and waiting, tokens, seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper ends of the histograms' buckets."""


class ServerMetrics:
    """Counts of one server, from its start."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "gristmill_requests", "Requests by the status of their answer.", ["status"], registry=self._registry
        )
        self.request_seconds = Histogram(
            "gristmill_request_seconds",
            "From the headers of a request to the end of its answer.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "gristmill_first_token_seconds",
            "From a prompt's tokens to the first of an answer.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "gristmill_prompt_tokens", "Tokens of the prompts that were answered.", registry=self._registry
        )
        self.completion_tokens = Counter(
            "gristmill_completion_tokens", "Tokens that were generated.", registry=self._registry
        )

    def watch(self, name: str, told: str, value: Callable[[], float]) -> None:
        """Show a number as it is when it is asked for."""
        Gauge(f"gristmill_{name}", told, registry=self._registry).set_function(value)

    def timed(self) -> AbstractContextManager[object]:
        """Measures a request."""
        return self.request_seconds.time()

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
