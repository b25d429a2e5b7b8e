"""Prompts to be answered, and what the right answer is where a set says it: for rewards that check answers.

    prompts       prompt or question, a text or messages; the right answer under `answer` where there is one
    any of SFT    what comes before the last answer is the prompt; that answer is the right one, unless a row has an
                  `answer`

Which one a row has is told by its keys, unless a manifest names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.dataprep.reading.conversations_forms import SFT_FORMS, form_of
from gristmill.dataprep.reading.conversations_messages import (
    Message,
    check_answered,
    checked_tools,
    turns,
    with_system,
)

PROMPT_KEYS = ("prompt", "question")
"""What a prompt alone is called; `question` is GSM8K's name."""
ANSWER = "answer"
Row = Mapping[str, Any]


def prompt_example(row: Row, form: str = "auto", answer: str = ANSWER) -> dict[str, Any]:
    """Bring a row into the shape of a prompt: `prompt`, messages that await an answer, and perhaps `answer`, a text.

    Args:
        row: as it was read.
        form: `prompts`, one of SFT_FORMS, or `auto`.
        answer: the key of the right answer.

    Raises:
        ValueError: it is of no known form, or not of the one that is asked for; says why.
    """
    form = prompt_form_of(row) if form == "auto" else form
    messages = _alone(row) if form == "prompts" else SFT_FORMS[form](row)
    right = _answer(answer, row.get(answer))
    if messages[-1]["role"] == "assistant":
        *messages, last = messages
        right = last["content"] if right is None else right
    if not messages:
        raise ValueError("there is no message in front of the answer")
    check_answered("the prompt", [*messages, {"role": "assistant", "content": "..."}])
    tools = checked_tools(row.get("tools"))
    return {"prompt": messages, **({} if right is None else {ANSWER: right}), **({"tools": tools} if tools else {})}


def prompt_form_of(row: Row) -> str:
    """The form that a row's keys tell.

    Raises:
        ValueError: they tell none.
    """
    if any(key in row for key in PROMPT_KEYS) and "completion" not in row and "response" not in row:
        return "prompts"
    try:
        return form_of(row)
    except ValueError:
        raise ValueError(f"no known form: its keys are {', '.join(row) or 'none'}; needed are prompt (or question), "
                         "or messages, or what instructions have") from None


def _alone(row: Row) -> list[Message]:
    key = next((key for key in PROMPT_KEYS if key in row), PROMPT_KEYS[0])
    return with_system(row, turns(key, row.get(key), "user"))


def _answer(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{key} must be a text or a number, not {value!r}")
