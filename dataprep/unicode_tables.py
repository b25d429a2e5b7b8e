"""What the kernels know about Unicode: one byte of flags and one lower-case form per code point.

The tables are made from Python's own `str` methods, so a kernel that looks a code point up agrees with Python of
the same version (`unicodedata.unidata_version`) on every one of them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gristmill.dataprep.kernels import kernel

CODE_POINTS = 0x110000

SPACE = np.uint8(1)
"""Flag: `str.split()` splits here (`str.isspace()`)."""
ALPHABETIC = np.uint8(2)
"""Flag: `str.isalpha()`."""
WORD = np.uint8(4)
"""Flag: `str.isalnum()` or the underscore; what `\\w` means in a regular expression."""
ALONE = np.uint8(8)
"""Flag: belongs to a script that is written without spaces, so that each code point counts as a word."""

UNSPACED_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Han extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han compatibility forms
    (0x20000, 0x3FFFF),  # Han extensions B and later
)
"""Blocks of the Unicode standard whose scripts put no spaces between words."""


@lru_cache(maxsize=1)
def code_point_flags() -> np.ndarray:
    """Flags of every code point: uint8 of shape (CODE_POINTS,)."""
    characters = [chr(code) for code in range(CODE_POINTS)]
    flags = np.zeros(CODE_POINTS, np.uint8)
    for flag, predicate in ((SPACE, str.isspace), (ALPHABETIC, str.isalpha), (WORD, str.isalnum)):
        flags[np.fromiter(map(predicate, characters), bool, CODE_POINTS)] |= flag
    flags[ord("_")] |= WORD
    for first, last in UNSPACED_RANGES:
        flags[first : last + 1] |= ALONE
    return flags


@lru_cache(maxsize=1)
def lower_case() -> np.ndarray:
    """Lower-case code point of every code point: uint32 of shape (CODE_POINTS,).

    The only one whose lower case is two code points (U+0130) stands for itself.
    """
    lowered = [chr(code).lower() for code in range(CODE_POINTS)]
    return np.fromiter(
        (ord(text) if len(text) == 1 else code for code, text in enumerate(lowered)), np.uint32, CODE_POINTS
    )


@kernel
def decode(data: np.ndarray, at: int) -> tuple[int, int]:
    """Read the code point that begins at a byte of valid UTF-8.

    Returns:
        the code point, and the number of bytes that it takes (RFC 3629, section 3).
    """
    lead = int(data[at])
    if lead < 0x80:
        return lead, 1
    second = int(data[at + 1]) & 0x3F
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | second, 2
    third = int(data[at + 2]) & 0x3F
    if lead < 0xF0:
        return (lead & 0x0F) << 12 | second << 6 | third, 3
    return (lead & 0x07) << 18 | second << 12 | third << 6 | int(data[at + 3]) & 0x3F, 4
