"""Which tasks a worker is handed together: many at first, few at last, so that all workers end at the same time.

Every batch is a bundle of Beam's, which costs some milliseconds on its way to a worker and back. A batch is at most
its share of half of what is left ("factoring": Hummel, Schonberg and Flynn, Communications of the ACM 35(8), 1992).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Batch = list[tuple[str, dict[str, Any]]]
"""Names and payloads of tasks."""
LEFT_OVER = 2
"""A batch takes one part of this many of a worker's share of what is left."""


class Sized(Protocol):
    """A task as `engine.Task` has it."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def payload(self) -> Mapping[str, Any]:
        """JSON."""

    @property
    def size_bytes(self) -> int:
        """Of its input; 0 where it is not known."""


def deal(tasks: Sequence[Sized], workers: int) -> list[Batch]:
    """Cut tasks into batches, the largest tasks first; a task of unknown size is a batch of its own.

    Args:
        workers: how many take batches, one after the other. With as many as there are tasks, each is alone.
    """
    batches: list[Batch] = []
    left = sum(task.size_bytes for task in tasks)
    room = 0.0
    for task in sorted(tasks, key=lambda task: (-task.size_bytes, task.name)):
        element = (task.name, dict(task.payload))
        if 0 < task.size_bytes <= room:
            batches[-1].append(element)
        else:
            batches.append([element])
            room = left / (LEFT_OVER * workers)
        room -= task.size_bytes
        left -= task.size_bytes
    return batches
