"""Early end of a training: SIGTERM, or a held-out loss that no longer improves."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping
from typing import Any

EXIT_TERMINATED = 128 + signal.SIGTERM

_requested = threading.Event()


class StoppedError(Exception):
    """The training received a request to stop; its state is saved."""


def stop_on_sigterm() -> None:
    """Install a handler of SIGTERM that stops the training after its current step."""
    signal.signal(signal.SIGTERM, lambda number, frame: _requested.set())


def stop_requested() -> bool:
    """Return True after SIGTERM."""
    return _requested.is_set()


def held_out_loss(metrics: Mapping[str, Any]) -> float | None:
    """Nats per token over all sources of metrics with `validation` (source -> loss,
    tokens, ...); None without.
    """
    sources = metrics.get("validation", {}).values()
    tokens = sum(source["tokens"] for source in sources)
    return (
        sum(source["loss"] * source["tokens"] for source in sources) / tokens
        if tokens
        else None
    )


def no_longer_improves(
    best: float | None, stale: int, loss: float, least: float
) -> tuple[float | None, int]:
    """Update the best loss and the validations since then; NaN and Inf are not
    improvements.
    """
    if math.isfinite(loss) and (best is None or loss < best - least):
        return loss, 0
    return best, stale + 1
