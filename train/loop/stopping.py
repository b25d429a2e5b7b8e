"""Early end of a training: SIGTERM, or a held-out loss that no longer improves."""

from __future__ import annotations

import math
import signal
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EXIT_TERMINATED = 128 + signal.SIGTERM

_requested = threading.Event()


class StoppedError(Exception):
    """The training received a request to stop; its state is saved."""


def stop_on_sigterm() -> None:
    """Install a handler of SIGTERM that stops the training after its current step, or
    on GPUs after the next.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: _requested.set())


def stop_requested() -> bool:
    """Return True after SIGTERM."""
    return _requested.is_set()


class AgreedStop:
    """Request of any rank to stop, seen by all ranks after the same step without
    waiting for the device's queue.

    Args:
        lag: steps after which the host reads the flag of a step: its copy from a device
            has arrived by then.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._flags: deque[tuple[Tensor, torch.Event | None]] = deque()

    def follow(self, stops: Tensor) -> None:
        """Start to copy the flag of a step, a scalar equal on all ranks, to the host."""
        import torch

        flag = stops.to("cpu", non_blocking=True)
        copied = None
        if stops.is_cuda:
            copied = torch.Event(stops.device)
            copied.record()
        self._flags.append((flag, copied))

    def is_due(self) -> bool:
        """Return the flag of the step `lag` steps ago; called after each step."""
        if len(self._flags) <= self._lag:
            return False
        flag, copied = self._flags.popleft()
        if copied is not None:
            copied.synchronize()
        return bool(flag)


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
