"""Answers of several turns: the model calls tools and continues after their results.

Each turn is sampled after the exact tokens before it. A sample depends only on the seed
of the answer and these tokens (`generation/sampling.py`), so answers do not depend on
their batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from gristmill.dataprep.examples.conversations import Example
from gristmill.train.data.conversation_tokens import Chat, ChatError
from gristmill.train.generation.scheduler import Request
from gristmill.train.rl.rollout import Generated
from gristmill.train.rl.tools.call_format import Call, CallFormat
from gristmill.train.rl.tools.tool_call import Used
from gristmill.train.rl.tools.toolbox import Toolbox

CUT = " [cut]"
"""Suffix of a truncated tool answer."""
Draw = Callable[[Sequence[Request]], list[Generated]]
"""Function from requests to one turn each, without tools."""


@dataclass(frozen=True)
class Asked:
    """A request, and the names of the tools described in its prompt."""

    request: Request
    offered: tuple[str, ...] = ()


@dataclass
class _Open:
    """An unfinished answer."""

    asked: Asked
    tokens: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ended: bool = False

    @property
    def left(self) -> int:
        """Number of tokens left for the answer."""
        return self.asked.request.max_new_tokens - len(self.tokens)

    def next_turn(self) -> Request:
        """Request for its next turn."""
        request = self.asked.request
        return replace(
            request, prompt=(*request.prompt, *self.tokens), max_new_tokens=self.left
        )

    def add(self, tokens: Sequence[int], drawn: bool) -> None:
        """Append tokens."""
        self.tokens += tokens
        self.drawn += [drawn] * len(tokens)


@dataclass(frozen=True)
class Dialogue:
    """Samples answers with tool calls.

    Attributes:
        chat: tokenizer and template.
        form: format of calls and tools' answers.
        tools: tools to call.
        turns: most turns of the assistant.
        answer_tokens: most tokens of a tool's answer.
    """

    chat: Chat
    form: CallFormat
    tools: Toolbox
    turns: int
    answer_tokens: int

    def encode(self, example: Example) -> tuple[list[int], tuple[str, ...]]:
        """Tokens of a prompt, and the names of its tools: those that the record
        describes, or all.

        Raises:
            ChatError: the record describes a tool that the training does not have, or
                the template refuses the prompt.
        """
        names = [
            str(tool.get("function", tool).get("name"))
            for tool in example.get("tools", ())
        ]
        if unknown := [name for name in names if name not in self.tools.names]:
            raise ChatError(
                f"`tools` of the record describes {unknown[0]!r}, which rl.tools does "
                f"not have; it has {', '.join(self.tools.names)}"
            )
        offered = tuple(names) or self.tools.names
        descriptions = self.tools.descriptions(offered)
        return self.form.prompt(example["prompt"], descriptions), offered

    def answers(self, draw: Draw, asked: Sequence[Asked]) -> list[Generated]:
        """Answer each request: turns, with the tools' answers between them.

        An answer is truncated if its tokens run out, if a tool's answer leaves no room
        for another turn (the tool's answer is then dropped), and if its last turn makes
        a call.
        """

        def cut(text: str) -> str:
            text = self.chat.plain(text)
            ids = self.chat.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) <= self.answer_tokens:
                return text
            return self.chat.decode(ids[: self.answer_tokens]) + CUT

        everyone = [_Open(answer) for answer in asked]
        running = everyone
        for turn in range(1, self.turns + 1):
            turns = draw([answer.next_turn() for answer in running])
            for answer, drawn in zip(running, turns, strict=True):
                answer.add(drawn.tokens, True)
                text = self.chat.decode(
                    drawn.tokens[:-1] if drawn.ended else drawn.tokens, special=True
                )
                # A truncated turn has no room for a tool's answer.
                answer.calls = (
                    self.form.calls(text)
                    if drawn.ended and answer.asked.offered
                    else []
                )
                answer.ended = drawn.ended and not answer.calls
            calling = (
                [answer for answer in running if answer.calls]
                if turn < self.turns
                else []
            )
            used = iter(
                self.tools.answer(
                    turn,
                    [
                        (call, open_answer.asked.offered)
                        for open_answer in calling
                        for call in open_answer.calls
                    ],
                )
            )
            running = []
            for open_answer in calling:
                answers = [
                    replace(tool_call, answer=cut(tool_call.answer))
                    for tool_call in islice(used, len(open_answer.calls))
                ]
                open_answer.used += answers
                tokens = self.form.answers([tool_call.answer for tool_call in answers])
                if len(tokens) < open_answer.left:
                    open_answer.add(tokens, False)
                    running.append(open_answer)
            if not running:
                break
        return [
            Generated(
                answer.tokens,
                answer.ended,
                tuple(answer.drawn),
                tuple(answer.used),
            )
            for answer in everyone
        ]
