"""Counting fixed phrases in text, ASCII letters in any case, without a look at most of the bytes' surroundings.

Each phrase is looked for at its rarest letter only, so that a text without `k` and `v` is done in one pass of table
look-ups however many phrases there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gristmill.dataprep.text.kernels import kernel

RAREST_FIRST = "zqjxkvbpgwyfmculdhrsnioate"
"""Letters of English by their frequency (Lewand, Cryptological Mathematics, 2000), the rarest first."""


class Phrases(NamedTuple):
    """Phrases as the kernels read them."""

    text: np.ndarray
    """uint8: all phrases in lower case, back to back."""
    offsets: np.ndarray
    """int64 of shape (n + 1,)."""
    anchors: np.ndarray
    """int64 of shape (n,): where in each phrase its anchor is."""
    heads: np.ndarray
    """int64 of shape (256,): the first phrase whose anchor a byte is, or -1."""
    chain: np.ndarray
    """int64 of shape (n,): the next phrase with the same anchor, or -1."""


def prepare_phrases(phrases: Sequence[str]) -> Phrases:
    """Prepare phrases for `count_phrases`.

    Raises:
        ValueError: a phrase is not in lower case or has no ASCII letter.
    """
    heads, chain = np.full(256, -1, np.int64), np.full(len(phrases), -1, np.int64)
    anchors = np.zeros(len(phrases), np.int64)
    for number, phrase in enumerate(phrases):
        letters = [letter for letter in RAREST_FIRST if letter in phrase]
        if phrase != phrase.lower() or not letters:
            raise ValueError(f"a phrase is lower case and has a letter from a to z, not {phrase!r}")
        anchors[number] = phrase.encode().index(letters[0].encode())
        for byte in (ord(letters[0]), ord(letters[0].upper())):
            # Both cases of a letter share the chain: it is linked once.
            chain[number] = heads[byte] if byte == ord(letters[0]) else chain[number]
            heads[byte] = number
    encoded = [phrase.encode() for phrase in phrases]
    offsets = np.concatenate([[0], np.cumsum([len(phrase) for phrase in encoded])]).astype(np.int64)
    return Phrases(np.frombuffer(b"".join(encoded), np.uint8), offsets, anchors, heads, chain)


@kernel
def count_phrases(data: np.ndarray, begin: int, end: int, phrases: Phrases) -> int:
    """How often any of the phrases occurs in `data[begin:end]`."""
    count = 0
    for at in range(begin, end):
        phrase = phrases.heads[data[at]]
        while phrase >= 0:
            first, last = phrases.offsets[phrase], phrases.offsets[phrase + 1]
            start = at - phrases.anchors[phrase]
            if start >= begin and start + last - first <= end and _is_at(data, start, phrases.text, first, last):
                count += 1
            phrase = phrases.chain[phrase]
    return count


@kernel
def _is_at(data: np.ndarray, start: int, text: np.ndarray, first: int, last: int) -> bool:
    for step in range(last - first):
        byte = data[start + step]
        if 0x41 <= byte <= 0x5A:
            byte |= np.uint8(0x20)
        if byte != text[first + step]:
            return False
    return True
