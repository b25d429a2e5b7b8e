"""User-defined chat formatters, in place of a chat template: `format(messages)` returns
segments.

A segment is (text, whether the assistant generates it). The generation prompt is the
text that the function writes before an answer, so prompts in generation equal those in
training.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from gristmill.core.files import read_json
from gristmill.dataprep.user_code.time_limits import TimeLimit, TimeLimitError
from gristmill.dataprep.user_functions import blame, load_function, load_own
from gristmill.mixtures.sections.tokenizer import OwnFormatter
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.tokenize.encoding.chat_templates import (
    PROBE,
    ChatMessage,
    Segments,
    TemplateRefusedError,
    ToolDescription,
    refuse_untrainable,
)

FORMATTER_FILE = "chat_formatter.json"
"""File in a tokenizer's folder with the formatter's code, in place of a chat
template.
"""


class FormatterError(ValueError):
    """A formatter that fails on a conversation, or does not return segments."""


class Formatter:
    """User-defined function that writes conversations.

    Raises:
        gristmill.mixtures.user_code.OwnCodeError: it cannot be loaded, or called with
            messages.
    """

    def __init__(self, own: OwnFormatter) -> None:
        self._own = own
        self._limits = threading.local()
        try:
            self._takes_tools = "tools" in self._limit().call(_parameters, own)
        except TimeLimitError as error:
            raise OwnCodeError(
                f"{own.use.file} cannot be loaded: {blame(own.use, error)}"
            ) from error
        self._call = load_own(
            own, "messages", *(["tools"] if self._takes_tools else [])
        )

    def _limit(self) -> TimeLimit:
        """Time limit for calls in this thread, active until the process ends."""
        if not hasattr(self._limits, "limit"):
            self._limits.limit = TimeLimit(self._own.time_limit_seconds).__enter__()
        limit: TimeLimit = self._limits.limit
        return limit

    @property
    def name(self) -> str:
        """Name in messages."""
        return self._own.use.reference

    def segments(
        self,
        messages: Sequence[ChatMessage],
        prompt: bool = False,
        tools: Sequence[ToolDescription] = (),
    ) -> Segments:
        """Write a conversation.

        Args:
            messages: with `role` and `content`.
            prompt: end with the generation prompt.
            tools: passed to a function with a parameter `tools`.

        Raises:
            FormatterError: the function raises, returns no segments, or not one for
                each answer.
        """
        conversation = [*messages, *PROBE[-1:]] if prompt else list(messages)
        arguments: list[Any] = [list(map(copy.deepcopy, conversation))]
        if self._takes_tools:
            arguments.append(copy.deepcopy(list(tools)) or None)
        try:
            pairs = self._limit().call(self._written, arguments)
        except Exception as error:
            raise FormatterError(
                " ".join(blame(self._own.use, error).split())
            ) from error
        parts: list[tuple[str, bool]] = []
        for pair in pairs:
            if (
                not isinstance(pair, tuple | list)
                or len(pair) != 2
                or not isinstance(pair[0], str)
                or not isinstance(pair[1], bool)
            ):
                raise FormatterError(
                    f"{self._own.use.place}: {self._own.use.name} gives "
                    f"{str(pair)[:40]!r} ({type(pair).__name__}) where a segment "
                    "belongs; give pairs of text and True where the assistant speaks, "
                    "else False"
                )
            if pair[0]:
                parts.append((pair[0], pair[1]))
        # Adjacent segments of one kind are encoded together.
        merged = [
            ("".join(text for text, _ in group), generated)
            for generated, group in groupby(parts, key=itemgetter(1))
        ]
        generated_places = [
            place for place, (_, generated) in enumerate(merged) if generated
        ]
        turns = sum(message["role"] == "assistant" for message in conversation)
        if len(generated_places) != turns:
            raise FormatterError(
                f"{self._own.use.place}: {self._own.use.name} marks "
                f"{len(generated_places)} answers in a conversation with {turns}; mark "
                "each answer and its "
                "end of turn, and put text that is not marked between two"
            )
        return merged[: generated_places[-1]] if prompt else merged

    def _written(self, arguments: Sequence[Any]) -> list[Any]:
        """Segments that the function returns or yields."""
        written = self._call(*arguments)
        return list(written) if isinstance(written, Iterable) else [written]


def _parameters(own: OwnFormatter) -> Collection[str]:
    try:
        return inspect.signature(load_function(own.use)).parameters
    except (TypeError, ValueError):  # a built-in function has no signature
        return ()


def read_formatter(folder: Path) -> Formatter | None:
    """Load the formatter of a tokenizer; None if it uses a template.

    Raises:
        gristmill.mixtures.user_code.OwnCodeError: it cannot be loaded.
    """
    path = folder / FORMATTER_FILE
    if not path.exists():
        return None
    return Formatter(OwnFormatter.model_validate(read_json(path)))


def check_formatter(own: OwnFormatter, special_tokens: Collection[str]) -> None:
    """Write a conversation twice, and refuse formatters that are unusable for training.

    Raises:
        TemplateRefusedError: as for templates; or the two results differ.
    """
    try:
        formatter = Formatter(own)
        segments, again = (formatter.segments(PROBE) for _ in range(2))
        prompt = "".join(
            text for text, _ in formatter.segments(PROBE[:-1], prompt=True)
        )
    except (OwnCodeError, FormatterError) as error:
        raise TemplateRefusedError(str(error)) from error
    if segments != again:
        raise TemplateRefusedError(
            f"{own.use.place}: {own.use.name} writes the same conversation in two "
            "ways; a prompt must be the same in training and in generation"
        )
    refuse_untrainable(
        segments,
        prompt,
        special_tokens,
        f"{own.use.place}: {own.use.name} does not mark all that "
        "the assistant says; give True with each answer and the end of its turn",
    )
