"""How a conversation with calls of tools is written: as the chat template does it, or in Hermes' form where that knows
nothing of tools.

What a model has drawn is never encoded again. Behind a turn that calls come the tokens that the template writes between
the end of that turn and the beginning of the next one, encoded on their own, as in training on conversations: what they
are follows from a conversation of probes that is rendered around the tools' answers (TRL's GRPOTrainer does so too).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.train.data.conversation_tokens import Chat, ChatError, Message

PROBE_NAME, PROBE_ARGUMENTS = "probed_tool", {"probed": "value"}
PROBE_ANSWER = "Probed."
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probed": {"type": "string", "description": "A probe."}},
            "required": ["probed"],
        },
    },
}
HERMES = "<tool_call>", "</tool_call>", "name", "arguments"
ASKING = 'To call a tool, write:\n<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
"""What a prompt says besides, where the template does not know tools."""


@dataclass(frozen=True)
class Call:
    """A call that a model has written.

    Attributes:
        name: of the tool; "" where that cannot be read.
        arguments: by name.
        problem: why it is no call that could be answered; "" where it is one.
    """

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


class CallFormat:
    """Reads calls out of a model's turns, and writes tools' answers as tokens.

    Args:
        chat: tokenizer and template.

    Attributes:
        templated: whether the template writes tools itself.

    Raises:
        ChatError: the template writes calls in a form that is not JSON.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        try:
            rendered = chat.segments(_probe([PROBE_ANSWER]), prompt=True, tools=[PROBE_TOOL])
        except ChatError:
            self.templated = False
            self._opening, self._closing, self._name, self._arguments = HERMES
            return
        self.templated = True
        written = "".join(text for text, generated in rendered if generated) or "".join(text for text, _ in rendered)
        self._opening, self._closing, self._name, self._arguments = _form_of(chat, written)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a prompt whose tools may be called.

        Raises:
            ChatError: the template refuses it.
        """
        if self.templated or not tools:
            ids: list[int] = self._chat.encode(messages, prompt=True, tools=tools).ids.tolist()
            return ids
        described = f"Tools: {json.dumps(list(tools), ensure_ascii=False)}\n{ASKING}\n\n"
        first = next(number for number, message in enumerate(messages) if message["role"] == "user")
        told = [
            {**message, "content": described + message["content"]} if number == first else message
            for number, message in enumerate(messages)
        ]
        ids = self._chat.encode(told, prompt=True).ids.tolist()
        return ids

    def calls(self, turn: str) -> list[Call]:
        """The calls in what the assistant said, special tokens and all but the end of its turn."""
        if not self._opening:
            return [self._call(turn, 0)[0]] if turn.lstrip().startswith("{") else []
        found, at = [], turn.find(self._opening)
        while at >= 0:
            call, end = self._call(turn, at + len(self._opening))
            found.append(call)
            at = turn.find(self._opening, end)
        return found

    def _call(self, turn: str, at: int) -> tuple[Call, int]:
        """The call at a place, and where it ends."""
        at += len(turn[at:]) - len(turn[at:].lstrip())
        try:
            written, end = json.JSONDecoder().raw_decode(turn, at)
        except (json.JSONDecodeError, RecursionError) as error:
            return Call("", {}, f"the call is no JSON: {getattr(error, 'msg', 'it is nested too deep')}"), at
        if not isinstance(written, dict) or not isinstance(written.get(self._name), str):
            return Call("", {}, f"a call is an object with {self._name!r} and {self._arguments!r}"), end
        name, arguments = written[self._name], written.get(self._arguments, {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (json.JSONDecodeError, RecursionError):
                return Call(name, {}, f"{self._arguments!r} is no JSON"), end
        if not isinstance(arguments, dict):
            return Call(name, {}, f"{self._arguments!r} is no object"), end
        return Call(name, arguments), end

    def answers(self, answers: Sequence[str]) -> list[int]:
        """The tokens between the end of a turn that calls and the next turn of the assistant, for tools' answers
        without special tokens."""
        if self.templated:
            rendered = self._chat.segments(_probe(answers), prompt=True, tools=[PROBE_TOOL])
        else:
            told = "\n".join(f"<tool_response>\n{one}\n</tool_response>" for one in answers)
            rendered = self._chat.segments(
                [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": told},
                ],
                prompt=True,
            )
        last = max(number for number, (_, generated) in enumerate(rendered) if generated)
        ids: list[int] = self._chat.tokenizer.encode(
            "".join(text for text, _ in rendered[last + 1 :]), add_special_tokens=False
        ).ids
        # Where the template's marks leave the end of a turn out, it is there already: the model has drawn it.
        return ids[1:] if ids and ids[0] in self._chat.stops else ids


def _probe(answers: Sequence[str]) -> list[dict[str, Any]]:
    """A conversation with as many calls as answers; ids as Mistral's templates want them, nine letters or digits."""
    ids = [f"call{number:05d}" for number in range(len(answers))]
    called = [
        {"id": one, "type": "function", "function": {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}} for one in ids
    ]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": called},
        *(
            {"role": "tool", "name": PROBE_NAME, "tool_call_id": one, "content": answer}
            for one, answer in zip(ids, answers, strict=True)
        ),
    ]


def _form_of(chat: Chat, written: str) -> tuple[str, str, str, str]:
    """What stands before and behind a call in a rendered turn, and the keys of its name and of its arguments."""
    at = written.find("{")
    while at >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(written, at)
        except json.JSONDecodeError:
            found, end = None, at
        if isinstance(found, dict) and PROBE_NAME in found.values():
            name = next(key for key, value in found.items() if value == PROBE_NAME)
            arguments = next(
                (key for key, value in found.items() if value in (PROBE_ARGUMENTS, json.dumps(PROBE_ARGUMENTS))),
                "arguments",
            )
            return written[:at].strip(), chat.plain(written[end:]).strip(), name, arguments
        at = written.find("{", at + 1)
    raise ChatError(
        f"{chat.folder}: the chat template writes calls of tools in a form that is not JSON, which "
        "rl.tools cannot read; give the tokenizer a template that writes them as JSON, or remove the tools"
    )
