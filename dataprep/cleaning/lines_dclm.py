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
    rows_array,
)
from gristmill.dataprep.edits import (
    Edit,
    RuleEdits,
    apply_edits,
    edits_array,
    then,
)
from gristmill.dataprep.text.kernels import (
    Bytes,
    Flags,
    Offsets,
    inner_kernel,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.spans import NEWLINE, strip
from gristmill.dataprep.text.swar import find_byte
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
_BLANK = r"\t\x0b-\r \pZ\x1c-\x1f\x{85}"
UNSTRIPPED = rf"^[\n{_BLANK}]|[\n{_BLANK}]$"
MAY_COUNT = rf"{UNSTRIPPED}|\pN[,.]*[kmb]?[{_BLANK}]+(?:{'|'.join(COUNTED)})"
CUT_SUBSTRINGS = (
    (
        rf"{UNSTRIPPED}|\n[{_BLANK}]+\n|.tems .n cart",
        "cart",
        re.compile(r"\s?items in cart", re.IGNORECASE),
    ),
    ("read more", "more", re.compile(r"\s?read more...$", re.IGNORECASE)),
    ("s.gn-.n", "gn-", re.compile(r"^sign-in\s?", re.IGNORECASE)),
)
"""Expression of RE2 for texts with a substring, in which `.` stands for an `i`, since
other letters match that in Python; letters that a line has in lower case; the
substring. The first also finds blank lines.
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
            new_edits = edit_lines(texts, MAY_COUNT, rule, _drop_counter, counts, sizes)
        else:
            rows, firsts = _drop_lines(
                *text_buffers(texts),
                code_point_flags(),
                character_classes(),
                rule,
                float(limit),
                counts,
                sizes,
            )
            new_edits = rows_array(rows, firsts)
        texts = apply_edits(texts, new_edits)
        edits = then(edits, new_edits)
    for may_match, letters, substring in CUT_SUBSTRINGS if options.substrings else ():
        cut = partial(
            _cut_substring,
            letters=letters,
            substring=substring,
            most_words=options.max_substring_words,
        )
        new_edits = edit_lines(texts, may_match, SUBSTRINGS, cut, counts, sizes)
        texts = apply_edits(texts, new_edits)
        edits = then(edits, new_edits)
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
    edits = new_rows()
    edit_count = 0
    firsts = np.zeros(len(offsets), np.int64)
    line = new_rows()[:1]
    flag = UPPER if rule == UPPERCASE else DIGIT
    for text in range(len(offsets) - 1):
        start, end = offsets[text], offsets[text + 1]
        begin, has_line = start, False
        kept_end = start
        # after the last line that is not blank
        last_count, last_end = edit_count, start
        while begin <= end:
            stop = find_byte(data, begin, end, NEWLINE)
            line[0, BEGIN], line[0, END] = begin, stop
            if begin == stop:
                is_dropped = False
            elif rule == FEW_WORDS:
                is_dropped = line_words(data, line, flags, int(limit)) < limit
            else:
                is_dropped = _ratio(data, begin, stop, classes, flag) > limit
            first, last = begin, stop
            if rule != FEW_WORDS:
                first, last = strip(data, begin, stop, flags)
            is_text = first < last or rule == FEW_WORDS
            if is_dropped:
                counts[text, rule] += 1
                sizes[text, rule] += stop - begin
            elif is_text or has_line:
                gap_end = begin - 1 if has_line else first
                if kept_end < gap_end:
                    edits = push(
                        edits, edit_count, kept_end - start, gap_end - start, 0
                    )
                    edit_count += 1
                has_line, kept_end = True, stop
                if is_text:
                    last_count, last_end = edit_count, last
            begin = stop + 1
        edit_count = last_count
        if last_end < end:
            edits = push(edits, edit_count, last_end - start, end - start, 0)
            edit_count += 1
        firsts[text + 1] = edit_count
    return edits[:edit_count], firsts


@inner_kernel
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
    line: str, letters: str, substring: re.Pattern[str], most_words: int
) -> str | None:
    """A line without a substring, or None if nothing or whitespace is left."""
    cut = line
    if letters in line.lower() and len(line.split()) <= most_words:
        cut = substring.sub("", line)
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
