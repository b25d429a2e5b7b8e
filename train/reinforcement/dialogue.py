"""Answers of several turns: the model calls tools, reads what they answer, and goes on.

Each turn is drawn behind the very tokens that came before it. What a draw depends on is the seed of the answer and
these tokens (`generation/sampling.py`), so that an answer is the same whoever is answered at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.generation.scheduler import Request
from gristmill.train.reinforcement.rollouts import Generated
from gristmill.train.reinforcement.tools.call_format import Call, CallFormat
from gristmill.train.reinforcement.tools.toolbox import Toolbox
from gristmill.train.reinforcement.tools.used import Used

CUT = " [cut]"
"""Behind a tool's answer that was too long."""
Draw = Callable[[Sequence[Request]], list[Generated]]
"""A turn for each request, without tools."""


@dataclass(frozen=True)
class Asked:
    """A request, and the names of the tools that its prompt describes."""

    request: Request
    offered: tuple[str, ...] = ()


@dataclass
class _Open:
    """An answer so far."""

    asked: Asked
    tokens: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ended: bool = False

    @property
    def left(self) -> int:
        """Tokens that it may still have."""
        return self.asked.request.max_new_tokens - len(self.tokens)

    def next_turn(self) -> Request:
        """What asks for its next turn."""
        request = self.asked.request
        return replace(request, prompt=(*request.prompt, *self.tokens), max_new_tokens=self.left)

    def add(self, tokens: Sequence[int], drawn: bool, logps: Sequence[float] | None = None) -> None:
        """Go on with some tokens."""
        self.tokens += tokens
        self.drawn += [drawn] * len(tokens)
        self.logps += [0.0] * len(tokens) if logps is None else logps


class Dialogue:
    """Draws answers in which tools are called.

    Args:
        chat: tokenizer and template.
        form: how calls and tools' answers are written.
        tools: that answer.
        turns: of the assistant, at most.
        answer_tokens: of a tool's answer, at most.
    """

    def __init__(self, chat: Chat, form: CallFormat, tools: Toolbox, turns: int, answer_tokens: int) -> None:
        self._chat, self._form, self._tools = chat, form, tools
        self._turns, self._answer_tokens = turns, answer_tokens

    def answers(self, draw: Draw, asked: Sequence[Asked]) -> list[Generated]:
        """An answer to each request: its turns, and between them what tools said.

        An answer is cut where its tokens are used up, where what tools said leaves no room for another turn (it is left
        out then), and where its last turn calls.
        """
        everyone = [_Open(one) for one in asked]
        running, by_engine = everyone, False
        for turn in range(1, self._turns + 1):
            found = draw([one.next_turn() for one in running])
            for one, drawn in zip(running, found, strict=True):
                by_engine = by_engine or drawn.logps is not None
                one.add(drawn.tokens, True, drawn.logps)
                said = self._chat.decode(drawn.tokens[:-1] if drawn.ended else drawn.tokens, special=True)
                # A turn that was cut has no room for an answer of a tool.
                one.calls = self._form.calls(said) if drawn.ended and one.asked.offered else []
                one.ended = drawn.ended and not one.calls
            calling = [one for one in running if one.calls] if turn < self._turns else []
            running = self._answered(turn, calling)
            if not running:
                break
        return [
            Generated(one.tokens, one.ended, tuple(one.drawn), tuple(one.used), tuple(one.logps) if by_engine else None)
            for one in everyone
        ]

    def _answered(self, turn: int, calling: Sequence[_Open]) -> list[_Open]:
        """Let tools answer; returns those who have room for another turn."""
        used = iter(self._tools.answer(turn, [(call, one.asked.offered) for one in calling for call in one.calls]))
        running = []
        for one in calling:
            answers = [replace(got, answer=self._cut(got.answer)) for got in islice(used, len(one.calls))]
            one.used += answers
            tokens = self._form.answers([got.answer for got in answers])
            if len(tokens) < one.left:
                one.add(tokens, False)
                running.append(one)
        return running

    def _cut(self, answer: str) -> str:
        answer = self._chat.plain(answer)
        ids = self._chat.tokenizer.encode(answer, add_special_tokens=False).ids
        if len(ids) <= self._answer_tokens:
            return answer
        return self._chat.decode(ids[: self._answer_tokens]) + CUT
