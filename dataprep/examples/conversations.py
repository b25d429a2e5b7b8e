"""Conversations from all input forms of instructions, in the message format of chat
templates.

Messages with images or sound are refused; keys that are not content are dropped.

    messages      messages (OpenAI's; also under the key conversations); the last may be
                  another than the assistant's
    sharegpt      conversations of from and value, optionally system and tools
    completion    prompt and completion (or response), texts or messages
    instruction   instruction and output, optionally input, system and history
                  (Alpaca's; LLaMA-Factory's history)
    labelled      text and label, a string, a whole number or a truth value: a message
                  and its answer

Unless a manifest names the form, a row's keys determine it, in this order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)
OPENAI_ROLES: Mapping[str, Role] = {
    **{role: role for role in ROLES},
    "developer": "system",
}
"""Roles of OpenAI's API; `developer` is its later name of `system`."""
SHAREGPT_ROLES: Mapping[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""Roles of FastChat, and of LLaMA-Factory for tool calls and their results."""
CALL = "function_call"
PART_TEXTS = ("text", "value")
"""Keys of the text in a content part: OpenAI's, and LLaMA-Factory's newer form."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of the assistant's reasoning; templates get it as `reasoning_content`, as in
transformers 5.
"""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Keys of a message or row with content other than text: OpenAI's, TRL's and
LLaMA-Factory's.
"""
WEIGHTS = ("weight", "loss_weight")
"""Keys of an assistant message's weight in training, 1 or 0: OpenAI's fine-tuning, and
LLaMA-Factory's newer form.
"""

Row = Mapping[str, Any]
"""Record as read: a JSON object with any keys."""
Tool = Mapping[str, Any]
"""Description of a tool: a JSON object, normally in OpenAI's form, passed to templates
unchanged.
"""


class CalledFunction(TypedDict):
    """Function of a tool call, with its arguments by name."""

    name: str
    arguments: dict[str, object]


class ToolCall(TypedDict):
    """Call of a tool by the assistant, as transformers' templates expect it."""

    id: NotRequired[str]
    type: Literal["function"]
    function: CalledFunction


class Message(TypedDict):
    """Message of a conversation.

    Attributes:
        role: of the speaker.
        content: may be empty beside tool calls.
        name: of the speaker; for a tool's message, of the tool.
        reasoning_content: of the assistant, before its content.
        tool_calls: of the assistant.
        tool_call_id: of the call that a tool's message answers.
        trained: False for an assistant's message whose tokens are not trained on.
    """

    role: Role
    content: str
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    trained: NotRequired[bool]


class Example(TypedDict, total=False):
    """Example of post-training; its kind determines its keys.

    Attributes:
        id: hash of the other fields, added by `read_set`.
        messages: conversation to fine-tune on.
        prompt: messages before the answers, for all other kinds.
        chosen, rejected: messages of the two answers of a preference pair.
        answer: reference answer of a prompt for reinforcement learning.
        columns: values of such a prompt's record that rewards take, by key.
        tools: descriptions of the tools that may be called.
    """

    id: str
    messages: list[Message]
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    answer: str
    columns: dict[str, object]
    tools: list[Tool]


def _converted(
    key: str, value: Any, convert: Callable[[str, Any], Message]
) -> list[Message]:
    return [
        convert(f"{key}, message {number}", message)
        for number, message in enumerate(_list(key, value), start=1)
    ]


def first_key(record: Row, keys: Iterable[str]) -> str | None:
    """First of some keys that a record has."""
    return next((key for key in keys if key in record), None)


def turns(key: str, value: Any, role: Role) -> list[Message]:
    """Convert a message, a list of messages in a format that the keys of the first one
    determine, or a text, which becomes one message of `role`.

    Raises:
        ValueError: it is not valid; names the message and its problem.
    """
    if not isinstance(value, dict | list):
        return [{"role": role, "content": text(key, value)}]
    messages = [value] if isinstance(value, dict) else value
    first = messages[0] if messages else None
    is_sharegpt = isinstance(first, dict) and "from" in first and "role" not in first
    convert = _sharegpt_message if is_sharegpt else _openai_message
    return _converted(key, messages, convert)


def text(key: str, value: Any) -> str:
    """Return a text that is not blank.

    Raises:
        ValueError: it is not a string, is blank, or cannot be encoded as UTF-8.
    """
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string")
    if not value.strip():
        raise ValueError(f"{key} is empty")
    return _encodable(key, value)


def checked_tools(value: Any) -> list[Tool]:
    """Parse tool descriptions, a list of objects or its JSON; empty if there are none.

    Raises:
        ValueError: it is neither.
    """
    tools = value or []
    if isinstance(value, str) and value.strip():
        tools = _parsed("tools", value)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools must be a list of objects, or the JSON of one")
    _encodable("tools", json.dumps(tools, ensure_ascii=False))
    return tools


def tools_of(row: Row) -> list[Tool]:
    """Tool descriptions of a row, also under OpenAI's former key `functions`.

    Raises:
        ValueError: they are not a list of objects.
    """
    if row.get("tools"):
        return checked_tools(row["tools"])
    return [
        {"type": "function", "function": function}
        for function in checked_tools(row.get("functions"))
    ]


def check_answered(what: str, messages: Sequence[Message]) -> None:
    """Check that a conversation ends with an answer, and its turns with `check_turns`.

    Raises:
        ValueError: the last message is not the assistant's.
    """
    if messages[-1]["role"] != "assistant":
        raise ValueError(
            f"{what} must end with the assistant, not with the {messages[-1]['role']}"
        )
    check_turns(what, messages)


def check_turns(what: str, messages: Sequence[Message]) -> None:
    """Check that the order of turns can be trained on.

    Raises:
        ValueError: there is no assistant message, a system message is not the first, or
            a tool's message answers no call.
    """
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError(f"{what} has no message of the assistant")
    previous_role = ""
    for number, message in enumerate(messages):
        if message["role"] == "system" and number:
            raise ValueError(f"{what} may have a system message only at its beginning")
        if message["role"] == "tool" and previous_role not in ("assistant", "tool"):
            raise ValueError(
                f"{what} has a tool's message behind the "
                f"{previous_role or 'beginning'}, not behind an assistant"
            )
        previous_role = message["role"]


def _openai_message(where: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: must be an object with role and content")
    role = OPENAI_ROLES.get(str(message.get("role")))
    if role is None:
        raise ValueError(
            f"{where}: unknown role {message.get('role')!r}; roles are "
            f"{', '.join(OPENAI_ROLES)}"
        )
    refuse_media(where, message)
    function_call = message.get("function_call")
    calls = message.get("tool_calls") or (function_call and [function_call])
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(where, part) for part in content)
    if calls and role != "assistant":
        raise ValueError(f"{where}: tool_calls are the assistant's, not the {role}'s")
    if calls and isinstance(content or "", str):
        content = _encodable(f"{where}: content", content or "")
    else:
        content = text(f"{where}: content", content)
    converted: Message = {"role": role, "content": content}
    if calls:
        calls = _list(f"{where}: tool_calls", calls)
        converted["tool_calls"] = [_call(where, call) for call in calls]
    if role == "assistant":
        _add_reasoning(where, message, converted)
        key = next((key for key in WEIGHTS if message.get(key) is not None), None)
        if key and message[key] not in (0, 1):
            raise ValueError(f"{where}: {key} must be 0 or 1, not {message[key]!r}")
        if key and not message[key]:
            converted["trained"] = False
    if role == "tool" and (call_id := message.get("tool_call_id")):
        converted["tool_call_id"] = text(f"{where}: tool_call_id", call_id)
    if name := message.get("name"):
        converted["name"] = text(f"{where}: name", name)
    return converted


def refuse_media(where: str, record: Row) -> None:
    """Refuse a message or row with images, videos or sound.

    Raises:
        ValueError: names the key.
    """
    if key := next((key for key in MEDIA if record.get(key)), None):
        raise ValueError(f"{where}: has {key}; only text can be trained on")


def _add_reasoning(where: str, message: Row, converted: Message) -> None:
    """Add the reasoning of an assistant's message, if it has any."""
    if key := next((key for key in REASONING if message.get(key)), None):
        converted["reasoning_content"] = text(f"{where}: {key}", message[key])


def _sharegpt_message(where: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: must be an object with from and value")
    speaker = message.get("from")
    role = SHAREGPT_ROLES.get(str(speaker))
    if role is None:
        raise ValueError(
            f"{where}: unknown speaker {speaker!r} in `from`; speakers are "
            f"{', '.join(SHAREGPT_ROLES)}"
        )
    refuse_media(where, message)
    content = text(f"{where}: value", message.get("value"))
    if speaker == CALL:
        calls = _parsed(f"{where}: value", content)
        calls = calls if isinstance(calls, list) else [calls]
        tool_calls = [_call(where, call) for call in calls]
        return {"role": role, "content": "", "tool_calls": tool_calls}
    converted: Message = {"role": role, "content": content}
    if role == "assistant":
        _add_reasoning(where, message, converted)
    return converted


def _call(where: str, call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: a call of a tool must name its function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(f"{where}: the arguments of {name}", arguments)
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{where}: the arguments of {name} must be an object, or the JSON of one"
        )
    converted: ToolCall = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if call.get("id"):
        converted = {"id": text(f"{where}: id", call["id"]), **converted}
    _encodable(where, json.dumps(converted, ensure_ascii=False))
    return converted


def _part_text(where: str, part: Any) -> str:
    form = part.get("type") if isinstance(part, dict) else type(part).__name__
    if form != "text":
        raise ValueError(
            f"{where}: a part of its content is {form!r}; only text can be trained on"
        )
    for key in PART_TEXTS:
        if isinstance(part.get(key), str):
            return str(part[key])
    raise ValueError(
        f"{where}: a part of its content is of type text, but has no string under "
        f"{' or '.join(PART_TEXTS)}; its keys are {', '.join(part)}"
    )


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
        raise ValueError(
            f"{key} has a lone surrogate, which UTF-8 cannot hold"
        ) from error
    return value


def said(message: Message) -> list[str]:
    """Texts of a message: its content, and the arguments of its tool calls as JSON."""
    calls = [
        json.dumps(call["function"]["arguments"], ensure_ascii=False, sort_keys=True)
        for call in message.get("tool_calls", [])
    ]
    return [part for part in (message["content"], *calls) if part]


def with_system(row: Row, messages: list[Message]) -> list[Message]:
    """Prepend a row's `system` text, unless it is missing or empty."""
    system = row.get("system")
    if system is None or system == "":
        return messages
    return [{"role": "system", "content": text("system", system)}, *messages]


def sft_example(row: Row, form: str = "auto") -> Example:
    """Convert a row to an SFT example (without `id`).

    Raises:
        ValueError: its form is unknown, or is not `form`; the message says why.
    """
    refuse_media("the record", row)
    messages = sft_messages(row, form_of(row) if form == "auto" else form)
    messages = with_system(row, messages)
    check_turns("the conversation", messages)
    return with_tools(row, {"messages": messages})


def with_tools(row: Row, example: Example) -> Example:
    """Add the tool descriptions of a row to an example, if it has any."""
    tools = tools_of(row)
    return {**example, "tools": tools} if tools else example


def form_of(row: Row) -> str:
    """Determine the form of a row from its keys.

    Raises:
        ValueError: the keys match no form.
    """
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        value = row["conversations"]
        first = value[0] if isinstance(value, list) and value else None
        return "messages" if isinstance(first, dict) and "role" in first else "sharegpt"
    if "prompt" in row and ("completion" in row or "response" in row):
        return "completion"
    if "instruction" in row and "output" in row:
        return "instruction"
    if "text" in row and "label" in row:
        return "labelled"
    raise ValueError(
        f"no known form: its keys are {', '.join(row) or 'none'}; needed are messages, "
        "or conversations, or prompt and completion, or instruction and output, or text "
        "and label"
    )


def sft_messages(row: Row, form: str) -> list[Message]:
    """Convert a row to messages; `with_system` adds the row's `system` text.

    Args:
        row: as read.
        form: `messages`, `sharegpt`, `completion`, `instruction` or `labelled`.

    Raises:
        ValueError: there is no such form, or the row does not have it.
    """
    if form == "messages":
        key = "messages" if "messages" in row else "conversations"
        return _converted(key, row.get(key), _openai_message)
    if form == "sharegpt":
        key = "conversations" if "conversations" in row else "messages"
        return _converted(key, row.get(key), _sharegpt_message)
    if form == "completion":
        key = "completion" if "completion" in row else "response"
        prompt = turns("prompt", row.get("prompt"), "user")
        return prompt + turns(key, row.get(key), "assistant")
    if form == "instruction":
        return instructed(row) + turns("output", row.get("output"), "assistant")
    if form == "labelled":
        label = row.get("label")
        if isinstance(label, int):
            label = str(label)
        return [
            {"role": "user", "content": text("text", row.get("text"))},
            {"role": "assistant", "content": text("label", label)},
        ]
    raise ValueError(
        f"there is no form {form!r}; there are messages, sharegpt, completion, "
        "instruction and labelled"
    )


def instructed(row: Row) -> list[Message]:
    """Messages before the answer, from an instruction, its input and its history."""
    question = text("instruction", row.get("instruction"))
    input_text = row.get("input") or ""
    if not isinstance(input_text, str):
        raise ValueError("input must be a string")
    if input_text:
        question += f"\n\n{input_text}"
    messages = []
    for number, pair in enumerate(row.get("history") or [], start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(
                f"history, pair {number}: must be a question and its answer"
            )
        messages += turns(f"history, question {number}", pair[0], "user")
        messages += turns(f"history, answer {number}", pair[1], "assistant")
    return messages + turns("instruction", question, "user")
