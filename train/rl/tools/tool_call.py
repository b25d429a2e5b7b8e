"""Tool calls with their answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Used:
    """A tool call with its answer.

    Attributes:
        turn: of the assistant, from 1.
        name, arguments: as written; the arguments as JSON.
        answer: the text for the model.
        failed: True if the answer is an error.
    """

    turn: int
    name: str
    arguments: str
    answer: str
    failed: bool
