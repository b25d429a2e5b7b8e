"""Which code points are letters, numbers and white space, asked of the `tokenizers` library itself.

The library's regular expressions have a version of Unicode of their own. It is asked block by block, where text has
code points of the block, so that the kernels and the library always agree.
"""

from __future__ import annotations

import numpy as np

CODE_POINTS = 0x110000
SURROGATES = range(0xD800, 0xE000)
BLOCK = 256
LETTER, NUMBER, SPACE, OTHER, ALONE, UNKNOWN = 0, 1, 2, 3, 4, 255
"""ALONE: a numeric character that `Digits` cuts out before anything else is looked at."""


class CharacterClasses:
    """The class of every code point that text had so far: `table`, uint8 of shape (0x110000,), UNKNOWN elsewhere."""

    def __init__(self, digits_alone: bool = False) -> None:
        """With `digits_alone`, what `Digits` calls numeric is of the class ALONE."""
        from tokenizers import Regex, pre_tokenizers

        self.table = np.full(CODE_POINTS, UNKNOWN, np.uint8)
        self._removers = [
            (kind, pre_tokenizers.Split(Regex(regex), "removed"))
            for kind, regex in ((LETTER, r"\p{L}"), (NUMBER, r"\p{N}"), (SPACE, r"\s"))
        ]
        self._digits = pre_tokenizers.Digits(individual_digits=True) if digits_alone else None

    def learn(self, code_point: int) -> None:
        """Ask the library for the classes of a code point's block."""
        first = code_point - code_point % BLOCK
        codes = np.array([code for code in range(first, first + BLOCK) if code not in SURROGATES])
        text = "".join(map(chr, codes.tolist()))
        found = np.full(len(codes), OTHER, np.uint8)
        for kind, remover in self._removers:
            removed = np.ones(len(codes), bool)
            for _, (begin, end) in remover.pre_tokenize_str(text):
                removed[begin:end] = False
            found[removed] = kind
        if self._digits is not None:
            found[[self._is_alone(chr(code)) for code in codes.tolist()]] = ALONE
        self.table[codes] = found

    def _is_alone(self, character: str) -> bool:
        assert self._digits is not None
        return len(self._digits.pre_tokenize_str(f"a{character}a")) == 3
