"""Check that a chat template writes everything in a conversation.

Templates without support for tools, reasoning or names omit them silently. Searching
the rendered text for them proves nothing: a tool's name may occur in the user's words.
So the conversation is rendered again with a mark, absent from the conversation, in each
of its parts: a part whose mark appears is written. A part whose mark does not appear is
changed alone, and the two texts are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from gristmill.dataprep.examples.conversations import Message, Tool
from gristmill.tokenize.chat_template import TEMPLATE_ERRORS

Render = Callable[[Sequence[Message], Sequence[Tool]], str]
"""Function from messages and descriptions of tools to the rendered text."""
Path = tuple[str | int, ...]
THINKING_END = "</think>"
"""End of reasoning inside a content (DeepSeek-R1, Qwen3), which templates may cut
off.
"""
MARK = "gristmillmark"


class _Conversation(TypedDict):
    messages: list[Message]
    tools: list[Tool]


@dataclass(frozen=True)
class Part:
    """A part of a conversation that a template should write.

    Attributes:
        label: for messages.
        path: its keys and indices, from `messages` or `tools` on.
        changes: functions from the part's value and a mark to another value; the first
            one's contains the mark.
    """

    label: str
    path: Path
    changes: tuple[Callable[[Any, str], Any], ...]


def part_left_out(
    render: Render, messages: Sequence[Message], tools: Sequence[Tool]
) -> Part | None:
    """First part of a conversation that a template does not write; None if it writes
    all of them.

    Args:
        render: renders the conversation.
        messages: `role` and `content` each, and perhaps `name`, `reasoning_content` and
            `tool_calls`.
        tools: descriptions of the tools that may be called.

    Raises:
        ValueError, jinja2.TemplateError and others of TEMPLATE_ERRORS: `render` rejects
        the conversation.
    """
    conversation: _Conversation = {"messages": list(messages), "tools": list(tools)}
    # a word that does not occur in the conversation
    mark = MARK
    while mark in json.dumps(conversation):
        mark += "x"
    text = render(messages, tools)
    parts = {
        f"{mark}{number:06}": part
        for number, part in enumerate(parts_of(messages, tools))
    }
    marked = conversation
    for own_mark, part in parts.items():
        marked = _with(marked, part.path, part.changes[0], own_mark)
    written = _rendered(render, marked) or ""
    for own_mark, part in parts.items():
        if own_mark in written:
            continue
        changed = (
            _rendered(render, _with(conversation, part.path, change, mark))
            for change in part.changes
        )
        if all(rerendered in (None, text) for rerendered in changed):
            return part
    return None


def parts_of(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[Part]:
    """Yield all parts of a conversation.

    The name and the id of a tool's answer are skipped if they repeat those of a call.
    """
    called_tools = {
        call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    for number, message in enumerate(messages):
        path = ("messages", number)
        where = f"message {number + 1} ({message['role']})"
        content = message["content"]
        if content.strip():
            yield Part(f"the content of {where}", (*path, "content"), (_append,))
        if message["role"] == "assistant" and THINKING_END in content:
            yield Part(
                f"the reasoning in the content of {where}",
                (*path, "content"),
                (
                    lambda text, mark: text.replace(
                        THINKING_END, mark + THINKING_END, 1
                    ),
                ),
            )
        repeats = message["role"] == "tool" and message.get("name") in called_tools
        for key in ("reasoning_content", "name"):
            if message.get(key) and not (key == "name" and repeats):
                yield Part(f"the {key} of {where}", (*path, key), (_append,))
        for place, call in enumerate(message.get("tool_calls", ())):
            function = (*path, "tool_calls", place, "function")
            label = f"the call of {call['function']['name']!r} in {where}"
            yield Part(label, (*function, "name"), (_append,))
            if call["function"]["arguments"]:
                yield Part(
                    f"the arguments of {label}",
                    (*function, "arguments"),
                    (_add_key, _empty),
                )
    for number, tool in enumerate(tools):
        tool_path: Path = ("tools", number)
        if "function" in tool:
            tool_path = (*tool_path, "function")
        definition = tool.get("function", tool)
        name = definition.get("name")
        description = definition.get("description")
        parameters = definition.get("parameters")
        label = f"the tool {name!r}"
        if isinstance(name, str) and name:
            yield Part(label, (*tool_path, "name"), (_append,))
        if isinstance(description, str) and description.strip():
            yield Part(
                f"the description of {label}", (*tool_path, "description"), (_append,)
            )
        if not isinstance(parameters, dict) or not parameters:
            continue
        label = f"the parameters of {label}"
        parameters_path = (*tool_path, "parameters")
        if "properties" not in parameters:
            yield Part(label, parameters_path, (_add_key, _empty))
        elif isinstance(parameters["properties"], dict) and parameters["properties"]:
            yield Part(
                label,
                (*parameters_path, "properties"),
                (
                    lambda properties, mark: {
                        **properties,
                        mark: {"type": "string", "description": mark},
                    },
                    _empty,
                ),
            )


def _append(text: str, mark: str) -> str:
    return text + mark


def _add_key(mapping: Mapping[str, object], mark: str) -> dict[str, object]:
    return {**mapping, mark: mark}


def _empty(mapping: Mapping[str, object], mark: str) -> dict[str, object]:
    return {}


def _with(value: Any, path: Path, change: Callable[[Any, str], Any], mark: str) -> Any:
    """Copy of a conversation with one part changed."""
    if not path:
        return change(value, mark)
    copy: Any = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = _with(value[path[0]], path[1:], change, mark)
    return copy


def _rendered(render: Render, conversation: _Conversation) -> str | None:
    """Text of a changed conversation; None if the template rejects it."""
    try:
        return render(conversation["messages"], conversation["tools"])
    except TEMPLATE_ERRORS:
        return None
