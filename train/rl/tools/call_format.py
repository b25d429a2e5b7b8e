"""Format of conversations with tool calls: the chat template's, or Hermes' if the
template does not support tools.

Sampled tokens are never encoded again. A turn with calls is followed by the template's
tokens between the end of that turn and the start of the next one, encoded separately,
as in training on conversations: they are taken from a rendered conversation of probes
around the tools' answers (as in TRL's GRPOTrainer).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gristmill.dataprep.examples.conversations import Message, Tool, ToolCall
from gristmill.train.data.conversation_tokens import Chat, ChatError

PROBE_NAME = "probed_tool"
PROBE_ARGUMENTS: dict[str, object] = {"probed": "value"}
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
ASKING = (
    'To call a tool, write:\n<tool_call>\n{"name": NAME, "arguments": '
    "{...}}\n</tool_call>"
)
"""Instruction added to prompts if the template does not support tools."""


@dataclass(frozen=True)
class Call:
    """A call written by a model.

    Attributes:
        name: of the tool; "" if unreadable.
        arguments: by name.
        problem: error that prevents an answer; "" if valid.
    """

    name: str
    arguments: Mapping[str, object]
    problem: str = ""


class CallFormat:
    """Parser of calls in a model's turns, and encoder of tools' answers.

    Args:
        chat: tokenizer and template.

    Attributes:
        templated: True if the template supports tools.

    Raises:
        ChatError: the template writes calls in a form that is not JSON.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        try:
            rendered = chat.segments(
                _probe([PROBE_ANSWER]), prompt=True, tools=[PROBE_TOOL]
            )
        except ChatError:
            self.templated = False
            self._opening, self._closing, self._name, self._arguments = HERMES
            return
        self.templated = True
        written = "".join(text for text, generated in rendered if generated) or "".join(
            text for text, _ in rendered
        )
        at = written.find("{")
        while at >= 0:
            try:
                entry, end = json.JSONDecoder().raw_decode(written, at)
            except json.JSONDecodeError:
                entry = None
            if isinstance(entry, dict) and PROBE_NAME in entry.values():
                self._opening = written[:at].strip()
                self._closing = chat.plain(written[end:]).strip()
                self._name = next(
                    key for key, value in entry.items() if value == PROBE_NAME
                )
                arguments = (PROBE_ARGUMENTS, json.dumps(PROBE_ARGUMENTS))
                self._arguments = next(
                    (key for key, value in entry.items() if value in arguments),
                    "arguments",
                )
                return
            at = written.find("{", at + 1)
        raise ChatError(
            f"{chat.folder}: the chat template writes calls of tools in a form that is "
            "not JSON, which rl.tools cannot read; give the tokenizer a template that "
            "writes them as JSON, or remove the tools"
        )

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Tokens of a prompt with tools.

        Raises:
            ChatError: the template rejects it.
        """
        if self.templated or not tools:
            return self._chat.encode(messages, prompt=True, tools=tools).ids.tolist()
        described = (
            f"Tools: {json.dumps(list(tools), ensure_ascii=False)}\n{ASKING}\n\n"
        )
        first = next(
            number
            for number, message in enumerate(messages)
            if message["role"] == "user"
        )
        prompt_messages: list[Message] = [
            {**message, "content": described + message["content"]}
            if number == first
            else message
            for number, message in enumerate(messages)
        ]
        ids = self._chat.encode(prompt_messages, prompt=True).ids.tolist()
        return ids

    def calls(self, turn: str) -> list[Call]:
        """Calls in a turn of the assistant, given with special tokens but without its
        end.
        """
        if not self._opening:
            return [self._call(turn, 0)[0]] if turn.lstrip().startswith("{") else []
        calls = []
        at = turn.find(self._opening)
        while at >= 0:
            call, end = self._call(turn, at + len(self._opening))
            calls.append(call)
            at = turn.find(self._opening, end)
        return calls

    def _call(self, turn: str, at: int) -> tuple[Call, int]:
        """Call at a position, and its end."""
        at += len(turn[at:]) - len(turn[at:].lstrip())
        try:
            entry, end = json.JSONDecoder().raw_decode(turn, at)
        except (json.JSONDecodeError, RecursionError) as error:
            return Call(
                "",
                {},
                f"the call is no JSON: {getattr(error, 'msg', 'it is nested too deep')}",
            ), at
        if not isinstance(entry, dict) or not isinstance(entry.get(self._name), str):
            return Call(
                "",
                {},
                f"a call is an object with {self._name!r} and {self._arguments!r}",
            ), end
        name = entry[self._name]
        arguments = entry.get(self._arguments, {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (json.JSONDecodeError, RecursionError):
                return Call(name, {}, f"{self._arguments!r} is no JSON"), end
        if not isinstance(arguments, dict):
            return Call(name, {}, f"{self._arguments!r} is no object"), end
        return Call(name, arguments), end

    def answers(self, answers: Sequence[str]) -> list[int]:
        """Tokens between the end of a turn with calls and the assistant's next turn,
        for tools' answers without special tokens.
        """
        if self.templated:
            rendered = self._chat.segments(
                _probe(answers), prompt=True, tools=[PROBE_TOOL]
            )
        else:
            responses = "\n".join(
                f"<tool_response>\n{answer}\n</tool_response>" for answer in answers
            )
            rendered = self._chat.segments(
                [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": responses},
                ],
                prompt=True,
            )
        last = max(
            number for number, (_, generated) in enumerate(rendered) if generated
        )
        ids: list[int] = self._chat.tokenizer.encode(
            "".join(text for text, _ in rendered[last + 1 :]), add_special_tokens=False
        ).ids
        # If the template's marks exclude the end of a turn, the model has already
        # sampled it.
        return ids[1:] if ids and ids[0] in self._chat.stops else ids


def _probe(answers: Sequence[str]) -> list[Message]:
    """Conversation with as many calls as answers; ids are nine letters or digits, as
    Mistral's templates require.
    """
    ids = [f"call{number:05d}" for number in range(len(answers))]
    calls: list[ToolCall] = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS},
        }
        for call_id in ids
    ]
    replies: list[Message] = [
        {"role": "tool", "name": PROBE_NAME, "tool_call_id": call_id, "content": answer}
        for call_id, answer in zip(ids, answers, strict=True)
    ]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *replies,
    ]
