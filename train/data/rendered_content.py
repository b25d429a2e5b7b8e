"""Check that a chat template writes everything in a conversation.

Templates without support for tools, reasoning or names omit them silently. Searching
the rendered text for them proves nothing: a tool's name may occur in the user's words.
So the conversation is rendered again with a mark, absent from the conversation, in each
of its parts: a part whose mark appears is written. A part whose mark does not appear is
changed alone, and the two texts are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from gristmill.dataprep.examples.conversations import Message, Tool
from gristmill.tokenize.chat_template import TEMPLATE_ERRORS, THINKING_END

Render = Callable[[Sequence[Message], Sequence[Tool]], str]
"""Function from messages and descriptions of tools to the rendered text."""
Path = tuple[str | int, ...]
"""Keys and indices of a part, from `messages` or `tools` on."""
Change = Callable[[Any, str], object]
"""Function from a part's value and a mark to another value."""
TEXTS = ("content", "reasoning_content", "name", "description")
OBJECTS = ("arguments", "parameters")
"""Keys of the parts that a template should write."""
CHANGES: Mapping[str, tuple[Change, ...]] = {
    "text": (lambda text, mark: text + mark,),
    "reasoning": (
        lambda text, mark: text.replace(THINKING_END, mark + THINKING_END, 1),
    ),
    "object": (
        lambda items, mark: {**items, mark: {"type": "string", "description": mark}},
        lambda items, mark: {},
    ),
}
"""Changes of a part by its kind; the result of the first one contains the mark."""
SHOWN_CHARACTERS = 40
MARK = "gristmillmark"


def part_left_out(
    render: Render, messages: Sequence[Message], tools: Sequence[Tool]
) -> str | None:
    """Place and value of the first part of a conversation that a template does not
    write; None if it writes all of them.

    Args:
        render: renders the conversation.
        messages: `role` and `content` each, and perhaps `name`, `reasoning_content` and
            `tool_calls`.
        tools: descriptions of the tools that may be called.

    Raises:
        ValueError, jinja2.TemplateError and others of TEMPLATE_ERRORS: `render` rejects
        the conversation.
    """
    conversation = {"messages": list(messages), "tools": list(tools)}
    # a word that does not occur in the conversation
    mark = MARK
    while mark in json.dumps(conversation):
        mark += "x"

    def rendered(changed: Any) -> str | None:
        """Text of a changed conversation; None if the template rejects it."""
        try:
            return render(changed["messages"], changed["tools"])
        except TEMPLATE_ERRORS:
            return None

    text = render(messages, tools)
    called = {
        call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    parts = {
        f"{mark}{number:06}": part
        for number, part in enumerate(parts_of(conversation, called))
    }
    marked: object = conversation
    for own_mark, (path, changes) in parts.items():
        marked = _with(marked, path, changes[0], own_mark)
    written = rendered(marked) or ""
    for own_mark, (path, changes) in parts.items():
        if own_mark in written or any(
            rendered(_with(conversation, path, change, mark)) not in (None, text)
            for change in changes
        ):
            continue
        kind, number, *keys = path
        value: Any = conversation
        for key in path:
            value = value[key]
        place = ".".join(map(str, keys))
        return (
            f"{place} of {str(kind)[:-1]} {int(number) + 1}: "
            f"{repr(value)[:SHOWN_CHARACTERS]}"
        )
    return None


def parts_of(
    value: object, called: Collection[str], path: Path = ()
) -> Iterator[tuple[Path, tuple[Change, ...]]]:
    """Yield all parts of a conversation, with changes of each.

    Args:
        value: messages and tools, or what is at `path` in them.
        called: names of the called tools, which their answers need not repeat.
        path: of the value.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from parts_of(item, called, (*path, number))
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        place = (*path, key)
        if key in TEXTS and isinstance(inner, str):
            is_repeated = value.get("role") == "tool" and inner in called
            if inner.strip() and not (key == "name" and is_repeated):
                yield place, CHANGES["text"]
            if value.get("role") == "assistant" and THINKING_END in inner:
                yield place, CHANGES["reasoning"]
        elif key in OBJECTS and isinstance(inner, Mapping):
            if key == "parameters" and "properties" in inner:
                place = (*place, "properties")
                inner = inner["properties"]
            if inner and isinstance(inner, Mapping):
                yield place, CHANGES["object"]
        else:
            yield from parts_of(inner, called, place)


def _with(value: Any, path: Path, change: Change, mark: str) -> Any:
    """Copy of a conversation with one part changed."""
    if not path:
        return change(value, mark)
    copy: Any = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = _with(value[path[0]], path[1:], change, mark)
    return copy
