"""Texts with shuffled words: a control that a language model must find worse."""

from __future__ import annotations

import random
import zlib


def shuffle_words(text: str) -> str:
    """Shuffle the words of each line, in an order that depends on the text alone."""
    order = random.Random(zlib.crc32(text.encode()))
    lines = []
    for line in text.split("\n"):
        words = line.split(" ")
        order.shuffle(words)
        lines.append(" ".join(words))
    return "\n".join(lines)
