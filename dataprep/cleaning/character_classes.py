"""What the line rules know about Unicode beyond `unicode_tables.py`: upper case, digits, and case in patterns."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gristmill.dataprep.unicode_tables import CODE_POINTS, lower_case

UPPER = np.uint8(1)
"""Flag: `str.isupper()`."""
DIGIT = np.uint8(2)
"""Flag: `str.isdigit()`."""
DECIMAL = np.uint8(4)
"""Flag: `str.isdecimal()`; what `\\d` means in a regular expression."""

CLASSED = 0x20000
"""From here on Unicode has ideographs, tags and variants only: none is upper case or a digit."""
ALIKE = {0x130: "i", 0x131: "i", 0x17F: "s", 0x212A: "k"}
"""The code points beyond ASCII that match an ASCII letter in a pattern that ignores case (documentation of `re`)."""


@lru_cache(maxsize=1)
def character_classes() -> np.ndarray:
    """Flags of every code point: uint8 of shape (CODE_POINTS,)."""
    characters = [chr(code) for code in range(CLASSED)]
    classes = np.zeros(CODE_POINTS, np.uint8)
    for flag, predicate in ((UPPER, str.isupper), (DIGIT, str.isdigit), (DECIMAL, str.isdecimal)):
        classes[:CLASSED] |= np.fromiter(map(predicate, characters), bool, CLASSED) * flag
    return classes


@lru_cache(maxsize=1)
def ignored_case() -> np.ndarray:
    """What an ASCII letter of a pattern that ignores case is compared with: uint32 of shape (CODE_POINTS,)."""
    table = lower_case().copy()
    for code, letter in ALIKE.items():
        table[code] = ord(letter)
    return table
