"""Why a training ends before its last step: SIGTERM, of which a note is taken, or a loss that no longer falls."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

EXIT_TERMINATED = 128 + signal.SIGTERM

_requested = threading.Event()


class StoppedError(Exception):
    """The training was asked to stop; its state is saved."""


def stop_on_sigterm() -> None:
    """From now on SIGTERM asks the training to stop after its current step."""
    signal.signal(signal.SIGTERM, _take_note)


def stop_requested() -> bool:
    """Whether SIGTERM has come."""
    return _requested.is_set()


def held_out_loss(line: Mapping[str, Any]) -> float | None:
    """Nats per token over all sources, from a line with `validation` (source -> loss, tokens, ...), if it has one."""
    sources = line.get("validation", {}).values()
    tokens = sum(source["tokens"] for source in sources)
    return sum(source["loss"] * source["tokens"] for source in sources) / tokens if tokens else None


def no_longer_improves(best: float | None, stale: int, loss: float, least: float) -> tuple[float | None, int]:
    """The best loss and the validations since it, after one more; a loss that is NaN or Inf is not an improvement."""
    if math.isfinite(loss) and (best is None or loss < best - least):
        return loss, 0
    return best, stale + 1


def _take_note(number: int, frame: FrameType | None) -> None:
    _requested.set()
