"""State of processes, read from /proc."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False
