"""Splitting text into pre-tokens as GPT-2's byte-level BPE does, in one pass over UTF-8 bytes.

The pattern is that of `tokenizers`' ByteLevel pre-tokenizer (Radford et al. 2019, encoder.py):

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

Which code points are letters, numbers and white space is asked of the library itself, block by block where text has
them, so that both always speak of the same version of Unicode.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.unicode_tables import decode

LETTER, NUMBER, SPACE, OTHER, UNKNOWN = 0, 1, 2, 3, 255
BLOCK = 256
CODE_POINTS = 0x110000
SURROGATES = range(0xD800, 0xE000)
_BLANK, _APOSTROPHE = 0x20, 0x27


class CharacterClasses:
    """The class of every code point that text had so far: `table`, uint8 of shape (0x110000,), UNKNOWN elsewhere."""

    def __init__(self) -> None:
        from tokenizers import pre_tokenizers

        self.table = np.full(CODE_POINTS, UNKNOWN, np.uint8)
        self._split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str

    def learn(self, code_point: int) -> None:
        """Ask the library for the classes of a code point's block."""
        first = code_point - code_point % BLOCK
        for code in range(first, min(first + BLOCK, CODE_POINTS)):
            if code not in SURROGATES:
                self.table[code] = self._ask(chr(code))

    def _ask(self, character: str) -> int:
        for probe, found in (("a", LETTER), ("1", NUMBER), ("!", OTHER)):
            # A run of one class is one piece.
            if len(self._split(probe + character + probe)) == 1:
                return found
        return SPACE


@kernel
def next_piece(data: np.ndarray, at: int, end: int, classes: np.ndarray) -> int:
    """Where the piece that begins at byte `at` ends; -1 - code point where its class is not known yet.

    Args:
        data: UTF-8; the piece is searched in data[at:end], which is not empty and begins on a code point.
        classes: CharacterClasses.table.
    """
    first = data[at]
    if first == _APOSTROPHE:
        length = _contraction(data, at, end)
        if length:
            return at + length
    code, width = decode(data, at)
    kind = classes[code]
    if kind == UNKNOWN:
        return -1 - code
    start = at + width
    if first == _BLANK and start < end:
        code, width = decode(data, start)
        following = classes[code]
        if following == UNKNOWN:
            return -1 - code
        if following != SPACE:
            return _run(data, start + width, end, classes, following)
    if kind != SPACE:
        return _run(data, start, end, classes, kind)
    stop = _run(data, start, end, classes, SPACE)
    if stop < 0 or stop == end:
        return stop
    # White space in front of something else leaves its last code point to what follows, unless it has no other.
    last = stop - 1
    while data[last] & 0xC0 == 0x80:
        last -= 1
    return stop if last == at else last


@kernel
def _run(data: np.ndarray, at: int, end: int, classes: np.ndarray, kind: int) -> int:
    """Where a run of one class ends that has begun before byte `at`; -1 - code point where a class is not known."""
    while at < end:
        byte = data[at]
        if byte < 0x80:
            code, width = int(byte), 1
        else:
            code, width = decode(data, at)
        found = classes[code]
        if found != kind:
            return -1 - code if found == UNKNOWN else at
        at += width
    return at


@kernel
def _contraction(data: np.ndarray, at: int, end: int) -> int:
    """Length of 's, 't, 'm, 'd, 're, 've or 'll at byte `at`, else 0."""
    if at + 1 >= end:
        return 0
    one = data[at + 1]
    if one == 0x73 or one == 0x74 or one == 0x6D or one == 0x64:
        return 2
    if at + 2 >= end:
        return 0
    two = data[at + 2]
    if (one == 0x72 or one == 0x76) and two == 0x65:
        return 3
    return 3 if one == 0x6C and two == 0x6C else 0


def split(text: str, classes: CharacterClasses) -> list[str]:
    """The pieces of a text."""
    data = np.frombuffer(text.encode(), np.uint8)
    ends, at = [0], 0
    while at < len(data):
        stop = next_piece(data, at, len(data), classes.table)
        if stop < 0:
            classes.learn(-1 - stop)
            continue
        ends.append(stop)
        at = stop
    return [bytes(data[begin:end]).decode() for begin, end in pairwise(ends)]
