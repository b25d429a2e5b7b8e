"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Ask Linux to send this process a signal when its parent ends, so that a killed run leaves nothing behind.

    Args:
        number: the signal.
        parent: the expected parent; where it has ended already, the signal comes at once.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
