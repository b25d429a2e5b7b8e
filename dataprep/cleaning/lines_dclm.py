"""RefinedWeb's line corrections, as edits, by DCLM's definitions (mlfoundations/dclm,
`mappers/modifiers.py`).

The steps run one after another over the entire text, whose lines end at U+000A; all but
`dclm_few_words` strip the text afterwards. Empty lines stay. A line is removed if

- `dclm_uppercase`: upper-case code points (`str.isupper()`) / code points >
  `max_uppercase_ratio`;
- `dclm_digits`: digits (`str.isdigit()`) / code points > `max_digit_ratio`;
- `dclm_counters`: in lower case it is a number (decimal digits, commas and dots,
  optionally `k`, `m` or `b`), whitespace, and one of COUNTED, with only non-word
  characters around it;
- `dclm_few_words`: it has fewer than `min_words` words (`str.split()`).

From lines of at most `max_substring_words` words, `dclm_substrings` removes, ignoring
case:

- every `items in cart`, with one whitespace before it;
- a closing `read more` and three more characters, with one whitespace before it: DCLM's
  pattern is `Read more...` with unescaped dots;
- an opening `sign-in`, with one whitespace after it.

A line that these reduce to whitespace is removed, as is a line that was only whitespace
before. DCLM removes URLs and caps newlines before these steps; here URLs stay, and
`max_newlines` caps after them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.cleaning.line_pieces import (
    BEGIN,
    DECIMAL,
    DIGIT,
    END,
    UPPER,
    character_classes,
    line_words,
    new_rows,
    push,
    push_edits,
    rows_array,
    strip_pieces,
)
from gristmill.dataprep.edits import (
    Edit,
    RuleEdits,
    apply_edits,
    derive_edits,
    edits_array,
    then,
)
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import skip_to_newlines
from gristmill.dataprep.text.unicode_tables import (
    SPACE,
    WORD,
    code_point_flags,
    decode,
    lower_case,
    skip_flagged,
)
from gristmill.mixtures.steps.clean import DclmLines

COUNTED = (
    "likes shares comments retweets reposts quotes bookmarks upvotes downvotes "
    "downloads views followers"
).split()
_COUNTED = tuple(np.frombuffer(word.encode(), np.uint8) for word in COUNTED)
RULES = (
    "dclm_uppercase",
    "dclm_digits",
    "dclm_counters",
    "dclm_few_words",
    "dclm_substrings",
)
UPPERCASE, DIGITS, COUNTERS, FEW_WORDS, SUBSTRINGS = range(len(RULES))
CUT_SUBSTRINGS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (r"\s?items in cart", r"\s?read more...$", r"^sign-in\s?")
)
BLANKS = r"\t\x0b-\r \pZ\x1c-\x1f\x{85}"
MAY_CUT = (
    rf"(?i)^[\n{BLANKS}]|[\n{BLANKS}]$|\n[{BLANKS}]+\n"
    r"|.tems .n cart|read more|s.gn-.n"
)
"""Pattern of RE2 for texts that substrings or whitespace are cut from. It has `.` for
an `i`, which other letters match in Python.
"""
NEVER = 2.0
"""Ratio that no line exceeds."""


def dclm_lines(texts: pa.Array, options: DclmLines) -> RuleEdits:
    """Edits of DCLM's line rules for n texts.

    Returns:
        edits (EDITS_TYPE); per text and rule of RULES the number of removed lines
        (`dclm_substrings`: changed or removed), and their bytes (`dclm_substrings`:
        removed bytes): two int64 arrays of shape (n, 5).
    """
    data, offsets = text_buffers(texts)
    rows, firsts, counts, sizes = _drop_lines(
        data,
        offsets,
        code_point_flags(),
        character_classes(),
        lower_case(),
        NEVER if options.max_uppercase_ratio is None else options.max_uppercase_ratio,
        NEVER if options.max_digit_ratio is None else options.max_digit_ratio,
        options.counters,
        options.min_words,
    )
    edits = rows_array(rows, firsts)
    if options.substrings:
        lines = apply_edits(texts, edits)
        cuts: list[Sequence[Edit]] = [()] * len(lines)
        for row in np.flatnonzero(pc.match_substring_regex(lines, MAY_CUT)).tolist():
            text = lines[row].as_py()
            cut, counts[row, SUBSTRINGS], sizes[row, SUBSTRINGS] = _cut_substrings(
                text, options.max_substring_words
            )
            cuts[row] = [*derive_edits(text, cut)]
        edits = then(edits, edits_array(cuts))
    return RuleEdits(edits, counts, sizes)


@kernel
def _drop_lines(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    classes: Flags,
    lower: np.ndarray,
    max_uppercase: float,
    max_digits: float,
    counters: bool,
    min_words: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    number = len(offsets) - 1
    edits = new_rows()
    edit_count = 0
    firsts = np.zeros(number + 1, np.int64)
    counts = np.zeros((number, 5), np.int64)
    sizes = np.zeros((number, 5), np.int64)
    lines = new_rows()
    for text in range(number):
        lines, last = _push_lines(lines, data, offsets[text], offsets[text + 1])
        first = 0
        for rule in range(4):
            is_enabled = (
                max_uppercase <= 1.0,
                max_digits <= 1.0,
                counters,
                min_words > 0,
            )[rule]
            if not is_enabled:
                continue
            kept = first
            for line in range(first, last):
                begin = lines[line, BEGIN]
                end = lines[line, END]
                if rule == UPPERCASE:
                    is_removed = (
                        begin < end
                        and _ratio(data, begin, end, classes, UPPER) > max_uppercase
                    )
                elif rule == DIGITS:
                    is_removed = (
                        begin < end
                        and _ratio(data, begin, end, classes, DIGIT) > max_digits
                    )
                elif rule == COUNTERS:
                    is_removed = is_counter(data, begin, end, flags, classes, lower)
                else:
                    piece = lines[line : line + 1]
                    words = line_words(data, piece, flags, min_words)
                    is_removed = begin < end and words < min_words
                if is_removed:
                    counts[text, rule] += 1
                    sizes[text, rule] += end - begin
                else:
                    lines[kept] = lines[line]
                    kept += 1
            last = kept
            if rule != FEW_WORDS:
                first, last = strip_pieces(data, lines, first, last, flags)
        edits, edit_count = push_edits(
            edits,
            edit_count,
            data,
            offsets[text],
            offsets[text + 1],
            lines,
            first,
            last,
        )
        firsts[text + 1] = edit_count
    return edits[:edit_count], firsts, counts, sizes


@kernel
def _push_lines(
    lines: np.ndarray, data: Bytes, begin: int, end: int
) -> tuple[np.ndarray, int]:
    """Lines of a text, as by `str.split` at newlines: one more than there are
    newlines.
    """
    count = 0
    while True:
        stop = skip_to_newlines(data, begin, end, 1)
        lines = push(lines, count, begin, stop, 1)
        count += 1
        if stop == end:
            return lines, count
        begin = stop + 1


@kernel
def _ratio(data: Bytes, begin: int, end: int, classes: Flags, flag: int) -> float:
    """Share of the code points that have a flag."""
    flagged = 0
    length = 0
    while begin < end:
        code, width = decode(data, begin)
        flagged += classes[code] & flag != 0
        length += 1
        begin += width
    return flagged / length


@kernel
def is_counter(
    data: Bytes,
    at: int,
    end: int,
    flags: Flags,
    classes: Flags,
    lower: np.ndarray,
) -> bool:
    """Return True if a line is only a number of likes, views and so on; every character
    is read once.
    """
    at = _skip_non_word(data, at, end, flags, lower)
    if at == end or classes[decode(data, at)[0]] & DECIMAL == 0:
        return False
    while at < end:
        code, width = decode(data, at)
        if not (code == 0x2C or code == 0x2E or classes[code] & DECIMAL):
            break
        at += width
    if at < end and data[at] < 0x80 and lower[data[at]] in (0x6B, 0x6D, 0x62):
        at += 1
    elif at < end and decode(data, at)[0] == 0x212A:
        # the lower case of the Kelvin sign is k
        at += 3
    spaces_begin = at
    at = skip_flagged(data, at, end, flags, SPACE)
    if at == spaces_begin:
        return False
    for word in _COUNTED:
        stop = after_phrase(data, at, end, lower, word)
        if stop > at:
            return _skip_non_word(data, stop, end, flags, lower) == end
    return False


@kernel
def _skip_non_word(
    data: Bytes, at: int, end: int, flags: Flags, lower: np.ndarray
) -> int:
    """Offset of the first word character from `at` on."""
    while at < end:
        code, width = decode(data, at)
        if flags[lower[code]] & WORD:
            return at
        at += width
    return end


@kernel
def after_phrase(
    data: Bytes, at: int, end: int, table: np.ndarray, phrase: np.ndarray
) -> int:
    """End of an ASCII phrase that begins at `at`, comparing code points through
    `table`; 0 if it does not match.
    """
    for letter in phrase:
        if at >= end:
            return 0
        code, width = decode(data, at)
        if table[code] != letter:
            return 0
        at += width
    return at


def _cut_substrings(text: str, most_words: int) -> tuple[str, int, int]:
    """A text without SUBSTRINGS, its number of changed or removed lines, and their
    removed bytes.
    """
    num_changed = num_bytes = 0
    for substring in CUT_SUBSTRINGS:
        lines = []
        for line in text.split("\n"):
            is_short = len(line.split()) <= most_words
            cut = substring.sub("", line) if is_short else line
            if line and not cut.strip():
                num_bytes += len(line.encode())
                num_changed += 1
                continue
            num_bytes += len(line.encode()) - len(cut.encode())
            num_changed += cut != line
            lines.append(cut)
        text = "\n".join(lines).strip()
    return text, num_changed, num_bytes


def cap_newlines(texts: pa.Array, most: int) -> RuleEdits:
    """Edits that cut every run of line ends to its first `most`; a line end is U+000A
    or U+000D U+000A.

    Returns:
        edits (EDITS_TYPE); per text the number of cut runs, and their bytes: two int64
        arrays of shape (n,).
    """
    data, offsets = text_buffers(texts)
    long_run = re.compile(rb"\n(?:\r?\n){%d}((?:\r?\n)+)" % (most - 1))
    cuts: list[list[Edit]] = []
    for begin, end in pairwise(offsets.tolist()):
        runs = long_run.finditer(data[begin:end].tobytes())
        cuts.append([(*run.span(1), "") for run in runs])
    counts = np.array([*map(len, cuts)], np.int64)
    sizes = [sum(last - first for first, last, _ in text_cuts) for text_cuts in cuts]
    return RuleEdits(edits_array(cuts), counts, np.array(sizes, np.int64))
