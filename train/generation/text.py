"""Ids as they come, turned into text as it is certain: no half characters, nothing of a text that ends the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What a decoder writes for the beginning of a character whose other bytes are still to come."""


class TextStream:
    """The text of an answer, piece by piece; the pieces joined are the whole answer.

    Args:
        decode: ids -> text.
        stops: texts that end the answer; they are not part of it.

    Attributes:
        is_stopped: whether one of them came.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stop for stop in stops if stop)
        self._ids: list[int] = []
        self._shown = 0
        """Ids whose text was taken; those before `_before` cannot change what comes any more."""
        self._before = 0
        self._held = ""
        self.is_stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """What is certain by now, given some more ids; "" while a character is unfinished."""
        self._ids += ids
        return self._release(self._taken(last=False), last=False)

    def finish(self) -> str:
        """What is left at the end, unfinished characters shown as such."""
        return self._release(self._taken(last=True), last=True)

    def _taken(self, last: bool) -> str:
        # Decoders may treat the first id differently, so new ids are decoded behind some that are shown already.
        before = self._decode(self._ids[self._before : self._shown])
        text = self._decode(self._ids[self._before :])
        if not last and text.endswith(UNFINISHED):
            return ""
        self._before, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def _release(self, text: str, last: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        ends = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.is_stopped, self._held = True, ""
            return text[: min(ends)]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
