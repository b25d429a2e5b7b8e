"""Unicode tables for kernels: a set of flags and a lower-case form per code point.

The tables are built with Python's own character classes, so a kernel agrees with Python
of the same version (`unicodedata.unidata_version`) on every code point.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from gristmill.dataprep.text.kernels import Bytes, Flags, inner_kernel


def ranges(listed: str) -> Iterator[tuple[int, int]]:
    """First and last code point of each range in a listed set, ascending."""
    for item in listed.split():
        first, _, last = item.partition("-")
        yield int(first, 16), int(last or first, 16)


DATATROVE_PUNCTUATION = """
0-8 B-1F 21-2F 3A-40 5B-60 7B-9F AB B4 BB 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362
1367-1368 166E 1735-1736 17D4-17D6 17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C
1C7E-1C7F 2013-2014 2019 201C-201E 2026 203C-203D 2047-2049 2236 2501 25BA 2E2E 2E3C 2E53-2E54 3001-3002 3008-300D
3010-3011 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE52 FE56-FE57 FF01
FF05 FF08-FF09 FF0C FF0E FF11 FF1A-FF1B FF1F FF5E FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048 110BE-110C1
11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 1144B-1144C 115C2-115C3 115C9-115D7
11641-11642 1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5
16B37-16B38 16B44 16E98 1BC9F 1DA88
"""
"""Code points that do not make a token a word in datatrove 0.10 (`PUNCTUATION_SET` of
utils/text.py): 281 code points, with most ASCII control characters (not the tab and the
line feed) and the full-width digit one, and without `‘`.
"""

ALPHABETIC_BEYOND_LETTERS = """
345 363-36F 5B0-5BD 5BF 5C1-5C2 5C4-5C5 5C7 610-61A 64B-657 659-65F 670 6D6-6DC 6E1-6E4 6E7-6E8 6ED 711 730-73F
7A6-7B0 816-817 81B-823 825-827 829-82C 8D4-8DF 8E3-8E9 8F0-903 93A-93B 93E-94C 94E-94F 955-957 962-963 981-983
9BE-9C4 9C7-9C8 9CB-9CC 9D7 9E2-9E3 A01-A03 A3E-A42 A47-A48 A4B-A4C A51 A70-A71 A75 A81-A83 ABE-AC5 AC7-AC9 ACB-
ACC AE2-AE3 AFA-AFC B01-B03 B3E-B44 B47-B48 B4B-B4C B56-B57 B62-B63 B82 BBE-BC2 BC6-BC8 BCA-BCC BD7 C00-C04
C3E-C44 C46-C48 C4A-C4C C55-C56 C62-C63 C81-C83 CBE-CC4 CC6-CC8 CCA-CCC CD5-CD6 CE2-CE3 D00-D03 D3E-D44 D46-D48
D4A-D4C D57 D62-D63 D81-D83 DCF-DD4 DD6 DD8-DDF DF2-DF3 E31 E34-E3A E4D EB1 EB4-EB9 EBB-EBC ECD F71-F83 F8D-F97
F99-FBC 102B-1036 1038 103B-103E 1056-1059 105E-1060 1062-1064 1067-106D 1071-1074 1082-108D 108F 109A-109D
16EE-16F0 1712-1713 1732-1733 1752-1753 1772-1773 17B6-17C8 1885-1886 18A9 1920-192B 1930-1938 1A17-1A1B 1A55-1A5E
1A61-1A74 1ABF-1AC0 1ACC-1ACE 1B00-1B04 1B35-1B43 1B80-1B82 1BA1-1BA9 1BAC-1BAD 1BE7-1BF1 1C24-1C36 1DD3-1DF4
2160-2182 2185-2188 24B6-24E9 2DE0-2DFF 3007 3021-3029 3038-303A A674-A67B A69E-A69F A6E6-A6EF A802 A80B A823-A827
A880-A881 A8B4-A8C3 A8C5 A8FF A926-A92A A947-A952 A980-A983 A9B4-A9BF A9E5 AA29-AA36 AA43 AA4C-AA4D AA7B-AA7D AAB0
AAB2-AAB4 AAB7-AAB8 AABE AAEB-AAEF AAF5 ABE3-ABEA FB1E 10140-10174 10341 1034A 10376-1037A 103D1-103D5 10A01-10A03
10A05-10A06 10A0C-10A0F 10D24-10D27 10EAB-10EAC 11000-11002 11038-11045 11073-11074 11080-11082 110B0-110B8 110C2
11100-11102 11127-11132 11145-11146 11180-11182 111B3-111BF 111CE-111CF 1122C-11234 11237 1123E 112DF-112E8
11300-11303 1133E-11344 11347-11348 1134B-1134C 11357 11362-11363 11435-11441 11443-11445 114B0-114C1 115AF-115B5
115B8-115BE 115DC-115DD 11630-1163E 11640 116AB-116B5 1171D-1172A 1182C-11838 11930-11935 11937-11938 1193B-1193C
11940 11942 119D1-119D7 119DA-119DF 119E4 11A01-11A0A 11A35-11A39 11A3B-11A3E 11A51-11A5B 11A8A-11A97 11C2F-11C36
11C38-11C3E 11C92-11CA7 11CA9-11CB6 11D31-11D36 11D3A 11D3C-11D3D 11D3F-11D41 11D43 11D47 11D8A-11D8E 11D90-11D91
11D93-11D96 11EF3-11EF6 12400-1246E 16F4F 16F51-16F87 16F8F-16F92 16FF0-16FF1 1BC9E 1E000-1E006 1E008-1E018
1E01B-1E021 1E023-1E024 1E026-1E02A 1E947 1F130-1F149 1F150-1F169 1F170-1F189
"""
"""Code points that are Alphabetic in Unicode but not for `str.isalpha()`: Roman
numerals, circled letters, and the vowel signs and other marks that are part of letters
(property Alphabetic without the categories L* in DerivedCoreProperties.txt of Unicode
14.0, the version of Python 3.11). POSIX classes such as `[[:alpha:]]` of the package
`regex` include them.
"""


CODE_POINTS = 0x110000

SPACE = np.uint16(1)
"""Flag: `str.split()` splits here (`str.isspace()`)."""
ALPHABETIC = np.uint16(2)
"""Flag: `str.isalpha()`."""
WORD = np.uint16(4)
r"""Flag: `str.isalnum()` or the underscore, like `\w` in a regular expression."""
ALONE = np.uint16(8)
"""Flag: of a script that is written without spaces, so that each code point counts as a
word.
"""
LATIN = np.uint16(16)
"""Flag: an ASCII letter, `[a-zA-Z]`."""
ALPHABETIC_PROPERTY = np.uint16(32)
"""Flag: Unicode's property Alphabetic, `[[:alpha:]]`: letters, letter-like numbers,
vowel signs.
"""
CONTENT = np.uint16(64)
"""Flag: not in datatrove's set of punctuation marks and control characters."""
SYMBOL = np.uint16(128)
"""Flag: `#` or `…`."""

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
"""Blocks of scripts without spaces between words, from the Unicode standard."""

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
"""Default_Ignorable_Code_Point of Unicode 14.0 (DerivedCoreProperties.txt), without the
Hangul fillers, which are letters, and the controls of musical notation and shorthand.
"""
NOTHING = np.uint32(0xFFFFFFFF)
"""Value of `word_letters` for invisible code points."""
LONE = np.uint32(1 << 31)
"""Flag of `word_letters`: a word by itself."""

ASSIGNED = ((0x0, 0x323B0), (0xE0000, 0xE01F0))
"""Ranges outside of which Unicode only has private-use and unassigned code points, for
which no method of `str` is true.
"""
Flag = np.unsignedinteger[Any]
"""A number with a single set bit."""
Predicate = Callable[[np.ndarray], np.ndarray]
"""Function from n characters (`U1`) to n booleans. Those of `np.strings` equal the
methods of `str`, at a tenth of the time.
"""


def flag_code_points(
    kind: type[Flag],
    predicates: Sequence[tuple[Flag, Predicate]],
    listed: Iterable[tuple[Flag, Iterable[tuple[int, int]]]],
) -> np.ndarray:
    """Flags of every code point: an array of unsigned integers, of shape
    (CODE_POINTS,).

    Args:
        predicates: flags, each with its predicate; not set outside of ASSIGNED.
        listed: flags, each with the first and last code points of its ranges.
    """
    flags = np.zeros(CODE_POINTS, kind)
    for begin, end in ASSIGNED:
        characters = np.arange(begin, end, dtype=np.uint32).view("U1")
        for flag, predicate in predicates:
            flags[begin:end] |= predicate(characters) * flag
    for flag, spans in listed:
        for first, last in spans:
            flags[first : last + 1] |= flag
    return flags


@lru_cache(maxsize=1)
def code_point_flags() -> np.ndarray:
    """Flags of every code point: uint16 of shape (CODE_POINTS,)."""
    flags = flag_code_points(
        np.uint16,
        (
            (SPACE, np.strings.isspace),
            (ALPHABETIC, np.strings.isalpha),
            (ALPHABETIC_PROPERTY, np.strings.isalpha),
            (WORD, np.strings.isalnum),
        ),
        (
            (ALPHABETIC_PROPERTY, ranges(ALPHABETIC_BEYOND_LETTERS)),
            (ALONE, UNSPACED_RANGES),
            (WORD, single("_")),
            (LATIN, ((0x41, 0x5A), (0x61, 0x7A))),
            (SYMBOL, single("#…")),
        ),
    )
    flags |= CONTENT
    for first, last in ranges(DATATROVE_PUNCTUATION):
        flags[first : last + 1] &= ~CONTENT
    return flags


def single(characters: str) -> list[tuple[int, int]]:
    """Characters as ranges of one code point each."""
    return [(ord(character), ord(character)) for character in characters]


def in_categories(*categories: str) -> Predicate:
    """Predicate that is true for characters of these general categories."""
    return lambda characters: np.fromiter(
        (
            unicodedata.category(chr(code)) in categories
            for code in characters.view(np.uint32).tolist()
        ),
        bool,
    )


@lru_cache(maxsize=1)
def lower_case() -> np.ndarray:
    """Lower-case code point of every code point: uint32 of shape (CODE_POINTS,).

    U+0130, the only one whose lower case is two code points, maps to itself. All others
    are lowered in one call except the sigma (U+03A3), whose lower case depends on its
    context.
    """
    lowered = np.arange(CODE_POINTS, dtype=np.uint32)
    code_points = np.delete(lowered, [0x130, 0x3A3])
    text = (
        code_points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass").lower()
    )
    lowered[code_points] = np.frombuffer(
        text.encode("utf-32-le", "surrogatepass"), "<u4"
    )
    lowered[0x3A3] = ord("\u03a3".lower())
    return lowered


@lru_cache(maxsize=2)
def word_letters(invisible: bool) -> np.ndarray:
    """Letter that each code point adds to a word: uint32 of shape (CODE_POINTS,).

    It is the lower case of a code point with the flag WORD, plus LONE if it has the
    flag ALONE, and 0 for all others, which end a word.

    Args:
        invisible: set NOTHING for the code points of INVISIBLE_RANGES, which neither
            end a word nor count.
    """
    flags = code_point_flags()
    letters = np.where(flags & WORD, lower_case(), np.uint32(0))
    letters[(flags & WORD != 0) & (flags & ALONE != 0)] |= LONE
    if invisible:
        for first, last in INVISIBLE_RANGES:
            letters[first : last + 1] = NOTHING
    return letters


@inner_kernel
def decode(data: Bytes, at: int) -> tuple[int, int]:
    """Decode the code point that starts at a byte of valid UTF-8.

    Returns:
        the code point, and its number of bytes (RFC 3629, section 3).
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
    return (lead & 0x07) << 18 | second << 12 | third << 6 | int(
        data[place + np.uint64(3)]
    ) & 0x3F, 4


@inner_kernel
def decode_before(data: Bytes, at: int) -> tuple[int, int]:
    """Decode the code point that ends before a byte of valid UTF-8.

    Returns:
        the code point, and its first byte.
    """
    at -= 1
    while data[at] & 0xC0 == 0x80:
        at -= 1
    return decode(data, at)[0], at


@inner_kernel
def skip_flagged(data: Bytes, at: int, end: int, flags: Flags, flag: int) -> int:
    """Position of the first code point from `at` on without a flag, or `end`."""
    while at < end:
        code, width = decode(data, at)
        if flags[code] & flag == 0:
            break
        at += width
    return at


def byte_table(characters: str) -> np.ndarray:
    """Table that is True for some ASCII characters: bool of shape (256,)."""
    table = np.zeros(256, np.bool_)
    table[list(characters.encode())] = True
    return table
