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
from contextlib import suppress
from dataclasses import dataclass

from gristmill.dataprep.examples.conversations import Message, Tool
from gristmill.tokenize.chat_template import (
    PROBE_ARGUMENTS,
    PROBE_NAME,
    PROBE_TOOL,
    THINKING_END,
    Segment,
    call_probe,
)
from gristmill.train.data.conversation_tokens import Chat, ChatError

PROBE_ANSWER = "Probed."
HERMES = "<tool_call>", "name", "arguments"
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
        ChatError: the template writes calls in a form that is not JSON, or changes
            them when their answers follow.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._opening, self._name, self._arguments = HERMES
        self.templated = False
        self._reasoning = ""
        written = ""
        with suppress(ChatError):
            written = self._probed_call()
        if not written:
            # Templates that keep the reasoning of calls may change calls without it.
            self._reasoning = PROBE_ANSWER
            with suppress(ChatError):
                written = self._probed_call()
        self.answers([PROBE_ANSWER])
        at = written.find("{")
        while at >= 0:
            try:
                entry, _ = json.JSONDecoder().raw_decode(written, at)
            except json.JSONDecodeError:
                entry = None
            if isinstance(entry, dict) and PROBE_NAME in entry.values():
                self._opening = written[:at].strip()
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
        if self.templated:
            raise ChatError(
                f"{chat.folder}: the chat template writes calls of tools in a form "
                "that is not JSON, which rl.tools cannot read; give the tokenizer a "
                "template that writes them as JSON, or remove the tools"
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
        prompt_messages = [*messages]
        question = messages[first]
        prompt_messages[first] = {
            **question,
            "content": described + question["content"],
        }
        return self._chat.encode(prompt_messages, prompt=True).ids.tolist()

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
            row = self._probe_row(answers)
        else:
            responses = "\n".join(
                f"<tool_response>\n{answer}\n</tool_response>" for answer in answers
            )
            row = self._chat.rows(
                [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": responses},
                ],
                prompt=True,
            )[-1]
        turns = [number for number, (_, turn) in enumerate(row) if turn]
        if not turns:
            raise ChatError(
                f"{self._chat.folder}: the chat template changes a turn of the "
                "assistant when the answer of a tool follows, so that rl.tools cannot "
                "continue it; give the tokenizer a template that does not, or remove "
                "the tools"
            )
        last = turns[-1]
        ids: list[int] = self._chat.tokenizer.encode(
            "".join(text for text, _ in row[last + 1 :]), add_special_tokens=False
        ).ids
        # If the template's marks exclude the end of a turn, the model has already
        # sampled it.
        return ids[1:] if ids and ids[0] in self._chat.stops else ids

    def _probed_call(self) -> str:
        """Call as the template writes it, without reasoning; empty if the template
        changes it when its answer follows.

        Raises:
            ChatError: the template does not support tools.
        """
        row = self._probe_row([PROBE_ANSWER])
        self.templated = True
        written = "".join(text for text, turn in row if turn)
        return written.rpartition(THINKING_END)[2]

    def _probe_row(self, answers: Sequence[str]) -> list[Segment]:
        """Last row of a conversation of probes, up to the assistant's next turn."""
        messages = call_probe(answers, self._reasoning)
        return self._chat.rows(messages, prompt=True, tools=[PROBE_TOOL])[-1]
