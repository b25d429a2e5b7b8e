"""The forms in which instructions come, each a function from a row to `{"messages"}` and perhaps `"tools"`.

    messages      messages (OpenAI's; also under the key conversations), which may end with another than the assistant
    sharegpt      conversations of from and value, and perhaps system and tools
    completion    prompt and completion (or response), texts or messages
    instruction   instruction and output, and perhaps input, system and history (Alpaca's; LLaMA-Factory's history)

Which one a row has is told by its keys, in this order, unless a manifest names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gristmill.dataprep.reading.conversations_messages import (
    Message,
    check_turns,
    checked_messages,
    checked_tools,
    sharegpt_messages,
    text,
    turns,
    with_system,
)

Row = Mapping[str, Any]


def sft_example(row: Row, form: str = "auto") -> dict[str, Any]:
    """Bring a row into the shape of an SFT example (without `id`).

    Raises:
        ValueError: it is of no known form, or not of the one that is asked for; says why.
    """
    messages = SFT_FORMS[form_of(row) if form == "auto" else form](row)
    check_turns("the conversation", messages)
    tools = checked_tools(row.get("tools"))
    return {"messages": messages, **({"tools": tools} if tools else {})}


def form_of(row: Row) -> str:
    """The form that a row's keys tell.

    Raises:
        ValueError: they tell none.
    """
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "sharegpt" if _speakers(row["conversations"]) else "messages"
    if "prompt" in row and ("completion" in row or "response" in row):
        return "completion"
    if "instruction" in row and "output" in row:
        return "instruction"
    raise ValueError(f"no known form: its keys are {', '.join(row) or 'none'}; needed are messages, or conversations, "
                     "or prompt and completion, or instruction and output")


def _speakers(value: Any) -> bool:
    return not (isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0])


def _messages(row: Row) -> list[Message]:
    key = "messages" if "messages" in row else "conversations"
    return with_system(row, checked_messages(key, row.get(key)))


def _sharegpt(row: Row) -> list[Message]:
    key = "conversations" if "conversations" in row else "messages"
    return with_system(row, sharegpt_messages(key, row.get(key)))


def _completion(row: Row) -> list[Message]:
    answer = "completion" if "completion" in row else "response"
    return with_system(row, turns("prompt", row.get("prompt"), "user") + turns(answer, row.get(answer), "assistant"))


def instructed(row: Row) -> list[Message]:
    """What an instruction, its input and its history say, before the answer."""
    question, more = text("instruction", row.get("instruction")), row.get("input") or ""
    if not isinstance(more, str):
        raise ValueError("input must be a string")
    asked = turns("instruction", f"{question}\n\n{more}" if more else question, "user")
    return [*_history(row.get("history")), *asked]


def _instruction(row: Row) -> list[Message]:
    return with_system(row, [*instructed(row), *turns("output", row.get("output"), "assistant")])


def _history(value: Any) -> list[Message]:
    messages = []
    for number, pair in enumerate(value or [], start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history, pair {number}: must be a question and its answer")
        messages += turns(f"history, question {number}", pair[0], "user")
        messages += turns(f"history, answer {number}", pair[1], "assistant")
    return messages


SFT_FORMS: dict[str, Callable[[Row], list[Message]]] = {
    "messages": _messages, "sharegpt": _sharegpt, "completion": _completion, "instruction": _instruction,
}
