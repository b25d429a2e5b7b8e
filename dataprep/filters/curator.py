"""Statistics of NeMo Curator's heuristics besides Gopher's rules
(stages/text/filters/heuristic/string.py, 1.3).

Shares of all code points of the text:

- non_alphanumeric_ratio: all but ASCII letters and digits, newlines and `?`, `!`, `,`,
  `.`.
- digit_ratio: ASCII digits.
- url_char_ratio: matches of `http://` or `https://` followed by at least one of ASCII
  letters and digits, the characters `$-_@.&+!*(),` and percent-encoded bytes. A slash
  is not among them: a URL counts up to the end of its host, as in Curator's code.
- whitespace_ratio: space, tab, newline, carriage return and backspace.
- bracket_ratio: the characters `()[]{}⟨⟩`.

Shares of parts of the text:

- boilerplate_paragraph_ratio: paragraphs (between double newlines, including empty
  ones) that have one of BOILERPLATE, ASCII letters in any case; 1 if the text has
  `lorem ipsum`. Curator also lists five cookie notices in full; two of them contain a
  phrase of BOILERPLATE, and the beginnings of the other three are in it.
- unended_line_ratio: lines (with anything but whitespace, between newlines) whose last
  character, ignoring trailing whitespace, is not one of `.`, `?`, `!`, `"` and `'`.

And longest_word_characters: code points of the longest word between whitespace. For a
text without any code point, or line, the shares are 1, so that it is dropped.
"""

from __future__ import annotations

from string import ascii_letters, digits

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.filters.lines_and_sentences import (
    EACH_NEWLINE,
    SPACE,
    drop_blank,
    split_segments,
    text_classes,
)
from gristmill.dataprep.filters.listed_words import PLACEHOLDER, any_case, count_matches
from gristmill.dataprep.filters.rule_sets import RuleSet, measure_by_kernel
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel
from gristmill.dataprep.text.unicode_tables import byte_table, decode
from gristmill.dataprep.thresholds import Columns
from gristmill.mixtures.steps.rules import Curator

MEASURED = (
    "non_alphanumeric_ratio",
    "digit_ratio",
    "url_char_ratio",
    "whitespace_ratio",
    "bracket_ratio",
    "boilerplate_paragraph_ratio",
    "unended_line_ratio",
    "longest_word_characters",
    "characters",
)
"""The columns and the code points of a text."""
BOILERPLATE = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "privacy overview",
    "use of cookies",
    "use cookies",
    "privacy & cookies policy",
    "privacy and cookies policy",
    "necessary cookies are absolutely essential for the website to function properly.",
    "any cookies that may not be particularly necessary for the website to function",
    "if you continue to browse this site without changing your cookie settings, you "
    "agree to this use.",
)

BOILERPLATE_PARAGRAPH = rf"(?:{'|'.join(map(any_case, BOILERPLATE))})(?:[^\n]|\n[^\n])*"
"""The first of these phrases in a paragraph, and the rest of the paragraph."""
URL = r"https?://(?:[a-zA-Z0-9$\-_@.&+!*(),]|%[0-9a-fA-F]{2})+"
_ALPHANUMERIC, _DIGIT, _WHITESPACE, _BRACKET = (np.uint8(1 << bit) for bit in range(4))
_BYTE_CLASSES = np.bitwise_or.reduce(
    [
        flag * byte_table(members)
        for flag, members in (
            (_ALPHANUMERIC, ascii_letters + digits + "\n?!,."),
            (_DIGIT, digits),
            (_WHITESPACE, " \t\n\r\b"),
            (_BRACKET, "()[]{}"),
        )
    ]
)
"""Flags of every byte: uint8 of shape (256,)."""
_IS_END = byte_table(".?!\"'")


def measure(rows: pa.Table, section: Curator) -> Columns:
    """Measure the columns of the rule set `curator` of n rows: int64
    (`longest_word_characters`) or float64 of shape (n,).
    """
    texts = pc.fill_null(rows["text"], "")
    columns = measure_by_kernel(
        MEASURED, _measure_texts, texts, text_classes(), fill=1.0
    )
    characters = columns.pop("characters")
    columns["longest_word_characters"] = columns["longest_word_characters"].astype(
        np.int64
    )
    without_urls = pc.replace_substring_regex(texts, URL, "")
    url_bytes = pc.subtract(pc.binary_length(texts), pc.binary_length(without_urls))
    np.divide(
        url_bytes, characters, out=columns["url_char_ratio"], where=characters > 0
    )
    columns["boilerplate_paragraph_ratio"] = np.where(
        count_matches(texts, PLACEHOLDER) > 0,
        1.0,
        count_matches(texts, BOILERPLATE_PARAGRAPH)
        / (1 + count_matches(texts, "\n\n")),
    )
    return columns


RULE_SET = RuleSet(measure)


@kernel
def _measure_texts(
    data: Bytes, offsets: Offsets, classes: Flags, values: np.ndarray
) -> None:
    for text in range(len(values)):
        begin, end = offsets[text], offsets[text + 1]
        row = values[text]
        total, alphanumeric, digits, white, brackets = 0, 0, 0, 0, 0
        word, longest_word, at = 0, 0, begin
        while at < end:
            code, width = decode(data, at)
            total += 1
            if code < 0x80:
                flags = _BYTE_CLASSES[code]
                alphanumeric += flags & _ALPHANUMERIC != 0
                digits += flags & _DIGIT != 0
                white += flags & _WHITESPACE != 0
                brackets += flags & _BRACKET != 0
            else:
                brackets += code == 0x27E8 or code == 0x27E9
            word = 0 if classes[code] & SPACE else word + 1
            longest_word = max(longest_word, word)
            at += width
        row[7], row[8] = longest_word, total
        if total:
            row[0], row[1] = (total - alphanumeric) / total, digits / total
            row[3], row[4] = white / total, brackets / total
        starts, ends = split_segments(data, begin, end, EACH_NEWLINE)
        starts, ends = drop_blank(data, starts, ends, classes, True)
        unended = 0
        for last in ends:
            unended += not _IS_END[data[last - 1]]
        if len(ends):
            row[6] = unended / len(ends)
