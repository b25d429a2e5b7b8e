"""What happens on SIGTERM: a note is taken, and the loop stops after its step with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType

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


def _take_note(number: int, frame: FrameType | None) -> None:
    _requested.set()
