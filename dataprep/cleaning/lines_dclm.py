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
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from gristmill.dataprep.cleaning.line_pieces import (
    BEGIN,
    DIGIT,
    END,
    UPPER,
    character_classes,
    edit_lines,
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
    edits_array,
    then,
)
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import skip_to_newlines
from gristmill.dataprep.text.unicode_tables import (
    code_point_flags,
    decode,
)
from gristmill.mixtures.steps.clean import DclmLines

COUNTED = (
    "likes shares comments retweets reposts quotes bookmarks upvotes downvotes "
    "downloads views followers"
).split()
COUNTER = re.compile(rf"\W*\d[,.\d]*[kmb]?\s+(?:{'|'.join(COUNTED)})\W*")
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
_BLANK = r"\t\x0b-\r \pZ\x1c-\x1f\x{85}"
UNSTRIPPED = rf"^[\n{_BLANK}]|[\n{_BLANK}]$"
MAY_CUT = rf"{UNSTRIPPED}|\n[{_BLANK}]+\n|.tems .n cart|read more|s.gn-.n"
"""Expression of RE2 for texts with blank lines or CUT_SUBSTRINGS; `.` stands for an
`i`, which other letters match in Python.
"""


def dclm_lines(texts: pa.Array, options: DclmLines) -> RuleEdits:
    """Edits of DCLM's line rules for n texts.

    Returns:
        edits (EDITS_TYPE); per text and rule of RULES the number of removed lines
        (`dclm_substrings`: changed or removed), and their bytes (`dclm_substrings`:
        removed bytes): two int64 arrays of shape (n, 5).
    """
    counts, sizes = np.zeros((2, len(texts), len(RULES)), np.int64)
    edits = edits_array([()] * len(texts))
    for rule, limit in (
        (UPPERCASE, options.max_uppercase_ratio),
        (DIGITS, options.max_digit_ratio),
        (COUNTERS, options.counters or None),
        (FEW_WORDS, options.min_words or None),
    ):
        if limit is None:
            continue
        if rule == COUNTERS:
            may_match = "|".join([UNSTRIPPED, *COUNTED])
            steps = [(COUNTERS, _drop_counter)]
            edits = edit_lines(texts, edits, may_match, steps, counts, sizes)
            continue
        rows, firsts = _drop_lines(
            *text_buffers(apply_edits(texts, edits)),
            code_point_flags(),
            character_classes(),
            rule,
            float(limit),
            counts,
            sizes,
        )
        edits = then(edits, rows_array(rows, firsts))
    if options.substrings:
        most_words = options.max_substring_words
        cuts = [
            partial(_cut_substring, substring=substring, most_words=most_words)
            for substring in CUT_SUBSTRINGS
        ]
        steps = [(SUBSTRINGS, cut) for cut in cuts]
        edits = edit_lines(texts, edits, MAY_CUT, steps, counts, sizes)
    return RuleEdits(edits, counts, sizes)


@kernel
def _drop_lines(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    classes: Flags,
    rule: int,
    limit: float,
    counts: np.ndarray,
    sizes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    number = len(offsets) - 1
    edits = new_rows()
    edit_count = 0
    firsts = np.zeros(number + 1, np.int64)
    lines = new_rows()
    flag = UPPER if rule == UPPERCASE else DIGIT
    for text in range(number):
        lines, last = _push_lines(lines, data, offsets[text], offsets[text + 1])
        first, kept = 0, 0
        for line in range(last):
            begin, end = lines[line, BEGIN], lines[line, END]
            is_removed = False
            if rule == FEW_WORDS and begin < end:
                piece = lines[line : line + 1]
                is_removed = line_words(data, piece, flags, int(limit)) < limit
            elif begin < end:
                is_removed = _ratio(data, begin, end, classes, flag) > limit
            if is_removed:
                counts[text, rule] += 1
                sizes[text, rule] += end - begin
            else:
                lines[kept] = lines[line]
                kept += 1
        if rule != FEW_WORDS:
            first, kept = strip_pieces(data, lines, first, kept, flags)
        edits, edit_count = push_edits(
            edits,
            edit_count,
            data,
            offsets[text],
            offsets[text + 1],
            lines,
            first,
            kept,
        )
        firsts[text + 1] = edit_count
    return edits[:edit_count], firsts


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


def _drop_counter(line: str) -> str | None:
    return None if COUNTER.fullmatch(line.lower()) else line


def _cut_substring(
    line: str, substring: re.Pattern[str], most_words: int
) -> str | None:
    """A line without a substring, or None if nothing or whitespace is left."""
    is_short = len(line.split()) <= most_words
    cut = substring.sub("", line) if is_short else line
    return None if line and not cut.strip() else cut


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
