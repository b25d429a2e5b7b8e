"""What of an example a step judges, as the text of a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.dataprep.reading.conversations_messages import said
from gristmill.dataprep.reading.examples import Kind
from gristmill.mixtures.prepare import ExampleStep

BOTH = "-of-both"
"""Ends the names of views of pairs that hold the rejected answer, too."""


def view_of(step: ExampleStep, kind: Kind) -> str:
    """The name of what a step judges: `answer` or `conversation`, of pairs also of both answers."""
    return step.judged + (BOTH if kind == "dpo" and step.stage == "dedup" else "")


def view_text(view: str, example: Mapping[str, Any]) -> str:
    """An example as one text: its messages, or those of the assistant's answers, with blank lines between.

    Args:
        view: as from `view_of`.
        example: `messages` of instructions; `prompt`, `chosen` and `rejected` of pairs; `prompt`, `completion` and
            `label` of single answers.
    """
    both = view.endswith(BOTH)
    if view.removesuffix(BOTH) == "answer":
        text = _text([message for message in _answers(example, both) if message["role"] == "assistant"])
    else:
        text = _text([*example.get("prompt", []), *_answers(example, both)])
    # The same answer with the other label is no duplicate.
    return f"{text}\n\n{'desirable' if example['label'] else 'undesirable'}" if both and "label" in example else text


def _answers(example: Mapping[str, Any], both: bool) -> Sequence[Mapping[str, Any]]:
    if "chosen" in example:
        return [*example["chosen"], *(example["rejected"] if both else [])]
    answers: Sequence[Mapping[str, Any]] = example["completion" if "label" in example else "messages"]
    return answers


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(part for message in messages for part in said(message))
