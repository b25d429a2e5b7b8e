"""Parts of a text: code points by class, lines and paragraphs, and sentences.

The table of classes comes from Python's own `str` methods and `unicodedata`, so that it
agrees with them on every code point. Terminal marks are the exception, since no module
of Python has that Unicode property.

Lines and paragraphs are split as by Python's `str.split`, `re.split` and
`str.splitlines`. A segment is a range of bytes. All kernels take time linear in the
bytes.

Counting sentences needs no trained model, so that it gives the same result on every
machine. Lines are those of `str.splitlines()`. A sentence ends at a run of terminal
marks (TERMINAL_RANGES, and U+2026) and the closing marks after it, if

- the line ends, or whitespace follows, or the run has a mark other than `.`, `?`, `!`
  and `…` (scripts that write no space there), and
- within a line, the run is not one full stop after an abbreviation (ABBREVIATIONS, in
  any case) or a single letter other than I (an initial),
- and the run is not an ellipsis (it has `.` or `…`, and is not one full stop) followed
  by lower case.

The remainder of a line after its last sentence end is a sentence if it has anything but
whitespace. C4 uses NLTK's Punkt (Kiss and Strunk 2006) with a model trained on
newspapers, and datatrove spaCy's `sentencizer`. On paragraphs of English books and
posts this rule finds as many sentences as Punkt, trained on the same text, in 95 of
100, and agrees on C4's three sentences in 99 of 100; the sentencizer agrees as often.
Punkt without training knows no abbreviations: 83 and 96 of 100
(tests/referees/test_punkt.py).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gristmill.dataprep.text.kernels import Bytes, Flags, Positions, kernel
from gristmill.dataprep.text.spans import (
    NEWLINE,
    count_code_points,
    end_of_line,
    strip,
)
from gristmill.dataprep.text.swar import count_byte, find_byte
from gristmill.dataprep.text.unicode_tables import (
    UNSPACED_RANGES,
    decode,
    flag_code_points,
    in_categories,
    ranges,
    single,
    skip_flagged,
)

SPACE = np.uint8(1)
"""Flag: `str.isspace()`."""
BREAK = np.uint8(2)
"""Flag: `str.splitlines()` ends a line here."""
TERMINAL = np.uint8(4)
"""Flag: ends sentences; see `TERMINAL_RANGES`."""
CLOSER = np.uint8(8)
"""Flag: may stand between the end of a sentence and the space after it; see
`CLOSERS`.
"""
LOWER = np.uint8(16)
"""Flag: `str.islower()`."""
LETTER = np.uint8(32)
"""Flag: `str.isalpha()`."""
WORD = np.uint8(64)
"""Flag: part of a word: `str.isalnum()`, the underscore, combining marks (category M)
and format characters (Cf).
"""
ALONE = np.uint8(128)
"""Flag: belongs to a script that is written without spaces, so that each code point
counts as a word.
"""

TERMINAL_RANGES = """
21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368
166E 1735-1736 17D4-17D6 17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F
1B7D-1B7E 1C3B-1C3C 1C7E-1C7F 203C-203D 2047-2049 2E2E 2E3C 2E53-2E54 3002 A4FF
A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE52
FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048
110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9
1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 1173C-1173E 11944 11946 11A42-11A43
11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 16B37-16B38 16B44
16E98 1BC9F 1DA88
"""
"""Marks that end a sentence: FineWeb's set of 159 (datatrove, utils/text.py).

It is Unicode's property Sentence_Terminal (PropList.txt, version 15.0), plus three
signs of Khmer (U+17D6, U+17D9, U+17DA), minus the one dot leader (U+2024), those of Old
Nubian (U+2CF9 to U+2CFB) and the vertical presentation forms (U+FE12, U+FE15, U+FE16).
"""

CLOSERS = "\"')]}’”»›」』）】*_"
"""Quotation marks, brackets, and Markdown's emphasis."""


@lru_cache(maxsize=1)
def text_classes() -> Flags:
    """Return the flags of every code point: uint8 of shape (CODE_POINTS,)."""
    flags = flag_code_points(
        np.uint8,
        (
            (SPACE, np.strings.isspace),
            (LOWER, np.strings.islower),
            (LETTER, np.strings.isalpha),
            (WORD, np.strings.isalnum),
            (WORD, in_categories("Mn", "Mc", "Me", "Cf")),
        ),
        (
            (WORD, single("_")),
            (TERMINAL, ranges(TERMINAL_RANGES)),
            (ALONE, UNSPACED_RANGES),
            (CLOSER, single(CLOSERS)),
        ),
    )
    for code in np.flatnonzero(flags & SPACE).tolist():
        if len(f"a{chr(code)}b".splitlines()) == 2:
            flags[code] |= BREAK
    return flags


@kernel
def count_words(data: Bytes, begin: int, end: int, classes: Flags) -> int:
    """Return the number of words and marks of `data[begin:end]`, close to the count of
    a linguistic tokenizer.

    A word is a run of code points with the flag WORD; a single full stop or apostrophe
    between two such runs joins them (`it's`, `3.14`, `e.g`). A code point with the flag
    ALONE is a word, and so is a run of any one other code point that is not whitespace
    (`,`, `----`). On English prose this is within 2 % of spaCy's count, which datatrove
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
        elif (
            in_word
            and (code == 0x2E or code == 0x27 or code == 0x2019)
            and at + width < end
            and classes[decode(data, at + width)[0]] & (WORD | ALONE) == WORD
        ):
            mark = -1
        else:
            count, in_word, mark = count + (code != mark), False, code
        at += width
    return count


EACH_NEWLINE, NEWLINE_RUNS, EACH_TWO_NEWLINES, TWO_NEWLINE_RUNS = 1, 2, 3, 4
"""Separators of segments: `\\n`, `\\n+`, `\\n\\n` (from the left, not overlapping),
`\\n\\n+`.
"""


@kernel
def split_segments(
    data: Bytes, begin: int, end: int, separator: int
) -> tuple[Positions, Positions]:
    """Split a text at newlines (U+000A only), like `str.split` and `re.split`: one
    segment more than separators.

    Args:
        separator: EACH_NEWLINE, NEWLINE_RUNS, EACH_TWO_NEWLINES or TWO_NEWLINE_RUNS.

    Returns:
        starts, ends: int64 byte positions, including empty segments.
    """
    newlines = count_byte(data, begin, end, NEWLINE)
    starts, ends = np.empty(newlines + 1, np.int64), np.empty(newlines + 1, np.int64)
    least = 2 if separator >= EACH_TWO_NEWLINES else 1
    whole_run = separator in (NEWLINE_RUNS, TWO_NEWLINE_RUNS)
    count, at = 0, begin
    starts[0] = begin
    while newlines > 0:
        at = find_byte(data, at, end, NEWLINE)
        stop = at + 1
        while stop < end and data[stop] == NEWLINE and (whole_run or stop - at < least):
            stop += 1
        newlines -= stop - at
        if stop - at >= least:
            ends[count], starts[count + 1] = at, stop
            count += 1
        at = stop
    ends[count] = end
    return starts[: count + 1], ends[: count + 1]


@kernel
def split_lines(data: Bytes, begin: int, end: int) -> tuple[Positions, Positions]:
    """Split a text into lines like `str.splitlines()`: at any line boundary of Unicode,
    without an empty last line.

    Returns:
        starts, ends: int64 byte positions, including empty lines.
    """
    starts, ends = np.empty(end - begin, np.int64), np.empty(end - begin, np.int64)
    count, start = 0, begin
    while start < end:
        starts[count] = start
        ends[count], start = end_of_line(data, start, end)
        count += 1
    return starts[:count], ends[:count]


@kernel
def drop_blank(
    data: Bytes,
    starts: Positions,
    ends: Positions,
    flags: Flags,
    stripped: bool,
) -> tuple[Positions, Positions]:
    """Return the segments with anything but whitespace, unchanged or stripped like
    `str.strip()`.
    """
    kept_starts, kept_ends = np.empty_like(starts), np.empty_like(ends)
    count = 0
    for segment in range(len(starts)):
        first, last = strip(data, starts[segment], ends[segment], flags)
        if first < last:
            kept_starts[count] = first if stripped else starts[segment]
            kept_ends[count] = last if stripped else ends[segment]
            count += 1
    return kept_starts[:count], kept_ends[:count]


@kernel
def segment_chars(data: Bytes, starts: Positions, ends: Positions) -> np.ndarray:
    """Return the number of code points of every segment (int64)."""
    chars = np.empty(len(starts), np.int64)
    for segment in range(len(starts)):
        chars[segment] = count_code_points(data, starts[segment], ends[segment])
    return chars


def code_points(characters: str) -> np.ndarray:
    """Return some characters as uint32, for `starts_with`."""
    return np.array([ord(character) for character in characters], np.uint32)


@kernel
def starts_with(data: Bytes, begin: int, end: int, marks: np.ndarray) -> bool:
    """Return True if a range begins with one of some code points.

    Args:
        marks: uint32 code points.
    """
    if begin >= end:
        return False
    code, _ = decode(data, begin)
    is_match = False
    for mark in marks:
        is_match |= code == mark
    return is_match


@kernel
def ends_with(data: Bytes, begin: int, end: int, suffix: np.ndarray) -> bool:
    """Return True if a range ends with these bytes (uint8, at least one)."""
    if end - begin < len(suffix):
        return False
    same = True
    for step in range(1, len(suffix) + 1):
        same &= data[end - step] == suffix[len(suffix) - step]
    return same


ABBREVIATIONS = tuple(
    "mr mrs ms dr prof st rev gen col capt lt sgt sen rep gov hon jr sr vs etc e.g i.e "
    "cf al fig figs vol pp eds inc ltd co corp dept univ jan feb aug sep sept oct nov "
    "dec mt ave blvd a.m p.m u.s u.k ph.d approx".split()
)
"""English titles, months, places and scholarly abbreviations, without their last full
stop.

The ones that occur in English books and essays are those that Punkt finds when it is
trained on these.
"""
OPENERS = "\"'([{“‘«*_"
"""Marks that may precede the word that a full stop ends."""

_PACKED = np.array(
    [int.from_bytes(word.encode(), "big") for word in ABBREVIATIONS], np.int64
)
_LONGEST = max(map(len, ABBREVIATIONS))
_OPENERS = np.array([ord(opener) for opener in OPENERS], np.int64)
_ELLIPSIS = 0x2026


@kernel
def count_sentences(data: Bytes, begin: int, end: int, classes: Flags) -> int:
    """Return the number of sentences of `data[begin:end]`, valid UTF-8; `classes` is
    `text_classes()`.
    """
    count, at, word, open_sentence = 0, begin, begin, False
    while at < end:
        code, width = decode(data, at)
        flags = classes[code]
        if flags & TERMINAL == 0 and code != _ELLIPSIS:
            if flags & BREAK:
                count, open_sentence = count + open_sentence, False
            if flags & SPACE:
                word = at + width
            else:
                open_sentence = True
            at += width
            continue
        run, dots, foreign, open_sentence = at, False, False, True
        while flags & TERMINAL or code == _ELLIPSIS:
            dots |= code == 0x2E or code == _ELLIPSIS
            # scripts whose marks need no space after them
            foreign |= code >= 0x80 and code != _ELLIPSIS
            at += width
            if at == end:
                break
            code, width = decode(data, at)
            flags = classes[code]
        full_stop = at == run + 1 and data[run] == 0x2E
        at = skip_flagged(data, at, end, classes, CLOSER)
        at_space = at == end or classes[decode(data, at)[0]] & SPACE != 0
        if not (foreign or at_space):
            continue
        if full_stop and _is_abbreviation(data, word, run, classes):
            continue
        if dots and not full_stop and _lower_follows(data, at, end, classes):
            continue
        count, open_sentence = count + 1, False
    return count + open_sentence


@kernel
def _is_abbreviation(data: Bytes, begin: int, end: int, classes: Flags) -> bool:
    while begin < end:
        code, width = decode(data, begin)
        if not np.any(code == _OPENERS):
            break
        begin += width
    if begin == end:
        return False
    code, width = decode(data, begin)
    if begin + width == end:
        return classes[code] & LETTER != 0 and code | 0x20 != 0x69
    if end - begin > _LONGEST:
        return False
    packed = 0
    for at in range(begin, end):
        byte = int(data[at])
        packed = packed << 8 | (byte | 0x20 if 0x41 <= byte <= 0x5A else byte)
    return bool(np.any(packed == _PACKED))


@kernel
def _lower_follows(data: Bytes, at: int, end: int, classes: Flags) -> bool:
    """Return True if the next code point of this line that is not whitespace is lower
    case.
    """
    while at < end:
        code, width = decode(data, at)
        flags = classes[code]
        if flags & BREAK:
            return False
        if flags & SPACE == 0:
            return flags & LOWER != 0
        at += width
    return False
