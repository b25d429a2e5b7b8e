"""What the kernels know about Unicode: a set of flags and one lower-case form per code point.

The tables are made from Python's own `str` methods, so a kernel that looks a code point up agrees with Python of
the same version (`unicodedata.unidata_version`) on every one of them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.unicode_sets import ALPHABETIC_BEYOND_LETTERS, DATATROVE_PUNCTUATION, ranges

CODE_POINTS = 0x110000

SPACE = np.uint16(1)
"""Flag: `str.split()` splits here (`str.isspace()`)."""
ALPHABETIC = np.uint16(2)
"""Flag: `str.isalpha()`."""
WORD = np.uint16(4)
"""Flag: `str.isalnum()` or the underscore; what `\\w` means in a regular expression."""
ALONE = np.uint16(8)
"""Flag: belongs to a script that is written without spaces, so that each code point counts as a word."""
LATIN = np.uint16(16)
"""Flag: an ASCII letter, `[a-zA-Z]`."""
ALPHABETIC_PROPERTY = np.uint16(32)
"""Flag: Unicode's property Alphabetic, `[[:alpha:]]`: letters, letter-like numbers, vowel signs."""
CONTENT = np.uint16(64)
"""Flag: not in datatrove's set of punctuation marks and control characters."""
SYMBOL = np.uint16(128)
"""Flag: `#` or `…`."""
MARK = np.uint16(256)
"""Flag: a combining mark (categories Mn and Mc) or a joiner, which goes with the code point before it."""

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

INVISIBLE_RANGES = (
    (0xAD, 0xAD),  # soft hyphen
    (0x34F, 0x34F),  # combining grapheme joiner
    (0x61C, 0x61C),  # Arabic letter mark
    (0x17B4, 0x17B5),  # Khmer inherent vowels
    (0x180B, 0x180F),  # Mongolian variation selectors and vowel separator
    (0x200B, 0x200F),  # zero-width space, joiners, direction marks
    (0x202A, 0x202E),  # embeddings and overrides of the direction
    (0x2060, 0x206F),  # word joiner, invisible operators, isolates, deprecated controls
    (0xFE00, 0xFE0F),  # variation selectors
    (0xFEFF, 0xFEFF),  # byte order mark
    (0xE0000, 0xE0FFF),  # tags, variation selectors
)
"""Default_Ignorable_Code_Point of Unicode 14.0 (DerivedCoreProperties.txt), without the Hangul fillers, which are
letters, and the controls of musical notation and shorthand."""
NOTHING = np.uint32(0xFFFFFFFF)
"""What `lower_case_seen` has for an invisible code point; no code point is as large."""

JOINERS = (0x200C, 0x200D)
"""Zero-width non-joiner and joiner."""
ASSIGNED = ((0x0, 0x323B0), (0xE0000, 0xE01F0))
"""Outside of these ranges Unicode has private use and code points that mean nothing: no method of `str` holds."""
Flag = np.unsignedinteger[Any]
"""A number with one bit set."""


def flag_code_points(
    kind: type[Flag], told: Iterable[tuple[Flag, Callable[[str], bool]]],
    listed: Iterable[tuple[Flag, Iterable[tuple[int, int]]]],
) -> np.ndarray:  # fmt: skip
    """Flags of every code point: an array of a kind of unsigned number, of shape (CODE_POINTS,).

    Args:
        told: flags, and the function that says of a character whether it has it; none has it outside of ASSIGNED.
        listed: flags, and the first and last code points of the ranges that have it.
    """
    flags = np.zeros(CODE_POINTS, kind)
    told = list(told)
    for begin, end in ASSIGNED:
        characters = [chr(code) for code in range(begin, end)]
        for flag, predicate in told:
            flags[begin:end] |= np.fromiter(map(predicate, characters), bool, end - begin) * flag
    for flag, spans in listed:
        for first, last in spans:
            flags[first : last + 1] |= flag
    return flags


@lru_cache(maxsize=1)
def code_point_flags() -> np.ndarray:
    """Flags of every code point: uint16 of shape (CODE_POINTS,)."""
    flags = flag_code_points(
        np.uint16,
        ((SPACE, str.isspace), (ALPHABETIC, str.isalpha), (ALPHABETIC_PROPERTY, str.isalpha), (WORD, str.isalnum),
         (MARK, _is_mark)),
        ((ALPHABETIC_PROPERTY, ranges(ALPHABETIC_BEYOND_LETTERS)), (ALONE, UNSPACED_RANGES),
         (WORD, single("_")), (LATIN, ((0x41, 0x5A), (0x61, 0x7A))), (SYMBOL, single("#…"))),
    )  # fmt: skip
    flags |= CONTENT
    for first, last in ranges(DATATROVE_PUNCTUATION):
        flags[first : last + 1] &= ~CONTENT
    return flags


def single(characters: str) -> list[tuple[int, int]]:
    """Some characters as ranges of one code point each."""
    return [(ord(character), ord(character)) for character in characters]


def _is_mark(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Mc") or ord(character) in JOINERS


@lru_cache(maxsize=1)
def lower_case() -> np.ndarray:
    """Lower-case code point of every code point: uint32 of shape (CODE_POINTS,).

    The only one whose lower case is two code points (U+0130) stands for itself.
    """
    lowered = [chr(code).lower() for code in range(CODE_POINTS)]
    return np.fromiter(
        (ord(text) if len(text) == 1 else code for code, text in enumerate(lowered)), np.uint32, CODE_POINTS
    )


@lru_cache(maxsize=1)
def lower_case_seen() -> np.ndarray:
    """`lower_case`, with NOTHING for the code points of INVISIBLE_RANGES."""
    lowered = lower_case().copy()
    for first, last in INVISIBLE_RANGES:
        lowered[first : last + 1] = NOTHING
    return lowered


@kernel
def decode(data: np.ndarray, at: int) -> tuple[int, int]:
    """Read the code point that begins at a byte of valid UTF-8.

    Returns:
        the code point, and the number of bytes that it takes (RFC 3629, section 3).
    """
    place = np.uint64(at)  # unsigned: no index counts from the end
    lead = int(data[place])
    if lead < 0x80:
        return lead, 1
    second = int(data[place + np.uint64(1)]) & 0x3F
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | second, 2
    third = int(data[place + np.uint64(2)]) & 0x3F
    if lead < 0xF0:
        return (lead & 0x0F) << 12 | second << 6 | third, 3
    return (lead & 0x07) << 18 | second << 12 | third << 6 | int(data[place + np.uint64(3)]) & 0x3F, 4
