"""Conversations from every form in which instructions come, in the one shape that chat templates take.

A message is `{"role", "content"}` with a role of ROLES, and perhaps a `name`. An assistant's may have
`reasoning_content`; `tool_calls`, a list of `{"type": "function", "function": {"name", "arguments"}}` whose arguments
are an object, as transformers' templates expect; and `"trained": false` where no token of it is to be learned. A tool's
may have a `tool_call_id`. A message with images or sound is refused; keys that are not content are left out.

    messages      messages (OpenAI's; also under the key conversations), which may end with another than the assistant
    sharegpt      conversations of from and value, and perhaps system and tools
    completion    prompt and completion (or response), texts or messages
    instruction   instruction and output, and perhaps input, system and history (Alpaca's; LLaMA-Factory's history)

A row's keys say which one it has, in this order, unless a manifest names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
OPENAI_ROLES = {**{role: role for role in ROLES}, "developer": "system"}
"""What OpenAI's API calls them; `developer` is its later name of `system`."""
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""FastChat's names and those of LLaMA-Factory for calls of tools and their answers."""
CALL = "function_call"
PART_TEXTS = ("text", "value")
"""What a part of a content calls its text: OpenAI, and LLaMA-Factory's newer form."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""What the assistant's reasoning is called; templates get it as transformers 5 gives it to them."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Keys of a message or row that hold more than text: OpenAI's, TRL's and LLaMA-Factory's."""
WEIGHTS = ("weight", "loss_weight")
"""Whether an assistant's message is learned, 1 or 0: OpenAI's fine-tuning format, and LLaMA-Factory's newer form."""

Message = dict[str, Any]


def checked_messages(key: str, value: Any) -> list[Message]:
    """Messages in OpenAI's shape, checked and normalised.

    Raises:
        ValueError: it is not a list of messages; names the message and what is wrong with it.
    """
    return [_openai_message(f"{key}, message {number}", one) for number, one in enumerate(_list(key, value), start=1)]


def sharegpt_messages(key: str, value: Any) -> list[Message]:
    """Messages from `{"from", "value"}`, where a `function_call` is an assistant's message with a call of a tool.

    Raises:
        ValueError: as `checked_messages`.
    """
    return [_sharegpt_message(f"{key}, message {number}", one) for number, one in enumerate(_list(key, value), start=1)]


def any_messages(key: str, value: Any) -> list[Message]:
    """Messages in either shape: the keys of the first one tell which."""
    first = value[0] if isinstance(value, list) and value else None
    is_sharegpt = isinstance(first, dict) and "from" in first and "role" not in first
    return (sharegpt_messages if is_sharegpt else checked_messages)(key, value)


def turns(key: str, value: Any, role: str) -> list[Message]:
    """Messages as they are given, one or several, or one message of `role` from a text."""
    if isinstance(value, dict):
        return any_messages(key, [value])
    return any_messages(key, value) if isinstance(value, list) else [{"role": role, "content": text(key, value)}]


def text(key: str, value: Any) -> str:
    """A text that is not blank.

    Raises:
        ValueError: it is not a string, blank, or cannot be UTF-8.
    """
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string")
    if not value.strip():
        raise ValueError(f"{key} is empty")
    return _encodable(key, value)


def checked_tools(value: Any) -> list[dict[str, Any]]:
    """Descriptions of tools, a list of objects or its JSON; empty where there are none.

    Raises:
        ValueError: it is neither.
    """
    found = _parsed("tools", value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise ValueError("tools must be a list of objects, or the JSON of one")
    _encodable("tools", json.dumps(found, ensure_ascii=False))
    return found


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The descriptions of a row's tools, also under OpenAI's former key `functions`.

    Raises:
        ValueError: they are not a list of objects.
    """
    if row.get("tools"):
        return checked_tools(row["tools"])
    return [{"type": "function", "function": function} for function in checked_tools(row.get("functions"))]


def check_answered(what: str, messages: Sequence[Message]) -> None:
    """Refuse what does not end with an answer, and what `check_turns` refuses.

    Raises:
        ValueError: the last message is not the assistant's.
    """
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{what} must end with the assistant, not with the {messages[-1]['role']}")
    check_turns(what, messages)


def check_turns(what: str, messages: Sequence[Message]) -> None:
    """Refuse an order of turns that cannot be trained on.

    Raises:
        ValueError: no message is the assistant's, a system message is not the first, or a tool's answers nothing.
    """
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError(f"{what} has no message of the assistant")
    before = ""
    for number, message in enumerate(messages):
        if message["role"] == "system" and number:
            raise ValueError(f"{what} may have a system message only at its beginning")
        if message["role"] == "tool" and before not in ("assistant", "tool"):
            raise ValueError(f"{what} has a tool's message behind the {before or 'beginning'}, not behind an assistant")
        before = message["role"]


def _openai_message(where: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: must be an object with role and content")
    role = OPENAI_ROLES.get(str(message.get("role")))
    if role is None:
        raise ValueError(f"{where}: role {message.get('role')!r} is none of {', '.join(OPENAI_ROLES)}")
    refuse_media(where, message)
    calls = message.get("tool_calls") or _former_call(message)
    if not calls:
        found: Message = {"role": role, "content": text(f"{where}: content", _joined(where, message.get("content")))}
    elif role != "assistant":
        raise ValueError(f"{where}: tool_calls are the assistant's, not the {role}'s")
    else:
        content = _joined(where, message.get("content")) or ""
        if not isinstance(content, str):
            raise ValueError(f"{where}: content must be a string")
        found = {
            "role": role,
            "content": _encodable(f"{where}: content", content),
            "tool_calls": [_call(where, call) for call in _list(f"{where}: tool_calls", calls)],
        }
    if role == "assistant":
        found |= _reasoning(where, message)
    if role == "assistant" and not _weight(where, message):
        found["trained"] = False
    keys = ("tool_call_id", "name") if role == "tool" else ("name",)
    return found | {key: text(f"{where}: {key}", message[key]) for key in keys if message.get(key)}


def refuse_media(where: str, record: Mapping[str, Any]) -> None:
    """Refuse a message or row that holds images, videos or sound.

    Raises:
        ValueError: names the key.
    """
    if key := next((key for key in MEDIA if record.get(key)), None):
        raise ValueError(f"{where}: has {key}; only text can be trained on")


def _reasoning(where: str, message: Mapping[str, Any]) -> dict[str, str]:
    """The reasoning of an assistant's message under the name that templates read."""
    key = next((key for key in REASONING if message.get(key)), None)
    return {} if key is None else {REASONING[0]: text(f"{where}: {key}", message[key])}


def _former_call(message: Mapping[str, Any]) -> list[Any]:
    """The call of OpenAI's former `function_call`."""
    call = message.get("function_call")
    return [call] if call else []


def _sharegpt_message(where: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: must be an object with from and value")
    speaker = message.get("from")
    role = SHAREGPT_ROLES.get(str(speaker))
    if role is None:
        raise ValueError(f"{where}: from {speaker!r} is none of {', '.join(SHAREGPT_ROLES)}")
    refuse_media(where, message)
    content = text(f"{where}: value", message.get("value"))
    if speaker != CALL:
        return {"role": role, "content": content, **(_reasoning(where, message) if role == "assistant" else {})}
    calls = _parsed(f"{where}: value", content)
    return {
        "role": role,
        "content": "",
        "tool_calls": [_call(where, call) for call in (calls if isinstance(calls, list) else [calls])],
    }


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{where}: a call of a tool must name its function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(f"{where}: the arguments of {function['name']}", arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments of {function['name']} must be an object, or the JSON of one")
    named = {"id": text(f"{where}: id", call["id"])} if call.get("id") else {}
    found = {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
    _encodable(where, json.dumps(found, ensure_ascii=False))
    return found


def _joined(where: str, content: Any) -> Any:
    """Content that is a list of parts, as one text."""
    if not isinstance(content, list):
        return content
    return "".join(_part(where, part) for part in content)


def _part(where: str, part: Any) -> str:
    form = part.get("type") if isinstance(part, dict) else part
    if form != "text":
        raise ValueError(f"{where}: a part of its content is {form!r}; only text can be trained on")
    found = next((part[key] for key in PART_TEXTS if isinstance(part.get(key), str)), None)
    if found is None:
        raise ValueError(
            f"{where}: a part of its content is of type text, but has no string under "
            f"{' or '.join(PART_TEXTS)}; its keys are {', '.join(part)}"
        )
    return str(found)


def _weight(where: str, message: Mapping[str, Any]) -> bool:
    """Whether a message is to be learned; all are that do not say otherwise."""
    for key in WEIGHTS:
        if (weight := message.get(key)) is not None:
            if weight not in (0, 1):
                raise ValueError(f"{where}: {key} must be 0 or 1, not {weight!r}")
            return bool(weight)
    return True


def _parsed(key: str, value: str) -> Any:
    try:
        return json.loads(value, parse_constant=str)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key} must be JSON: {error}") from error


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} must be a list of messages")
    return value


def _encodable(key: str, value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{key} has a lone surrogate, which UTF-8 cannot hold") from error
    return value


def said(message: Mapping[str, Any]) -> list[str]:
    """What a message says, and what it calls tools with, as JSON."""
    calls = [
        json.dumps(call["function"]["arguments"], ensure_ascii=False, sort_keys=True)
        for call in message.get("tool_calls", [])
    ]
    return [part for part in (message["content"], *calls) if part]


def with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The messages behind a row's own `system` text, where it has one that is not empty."""
    system = row.get("system")
    if system is None or system == "":
        return messages
    return [{"role": "system", "content": text("system", system)}, *messages]


Row = Mapping[str, Any]


def sft_example(row: Row, form: str = "auto") -> dict[str, Any]:
    """Bring a row into the shape of an SFT example (without `id`).

    Raises:
        ValueError: it is of no known form, or not of the one that is asked for; says why.
    """
    refuse_media("the record", row)
    messages = SFT_FORMS[form_of(row) if form == "auto" else form](row)
    check_turns("the conversation", messages)
    tools = tools_of(row)
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
    raise ValueError(
        f"no known form: its keys are {', '.join(row) or 'none'}; needed are messages, or conversations, "
        "or prompt and completion, or instruction and output"
    )


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
    "messages": _messages,
    "sharegpt": _sharegpt,
    "completion": _completion,
    "instruction": _instruction,
}
