"""A call of a tool with its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Used:
    """A call with its answer.

    Attributes:
        turn: of the assistant, from 1.
        name, arguments: as they were written; the arguments as JSON.
        answer: what the model was told.
        failed: whether that is an error.
    """

    turn: int
    name: str
    arguments: str
    answer: str
    failed: bool
