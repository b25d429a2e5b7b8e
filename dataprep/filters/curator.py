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

from string import ascii_letters, digits, hexdigits

import numpy as np

from gristmill.core.arrays import Column
from gristmill.dataprep.filters.lines_and_sentences import SPACE, text_classes
from gristmill.dataprep.filters.listed_words import (
    PLACEHOLDER,
    Phrases,
    count_phrases,
    prepare_phrases,
)
from gristmill.dataprep.filters.rule_sets import RuleSet
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import skip_to_newlines, strip
from gristmill.dataprep.text.unicode_tables import byte_table, decode
from gristmill.dataprep.thresholds import Columns

CURATOR_SHARES = (
    "non_alphanumeric_ratio",
    "digit_ratio",
    "url_char_ratio",
    "whitespace_ratio",
    "bracket_ratio",
    "boilerplate_paragraph_ratio",
    "unended_line_ratio",
)
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

_BOILERPLATE = prepare_phrases(BOILERPLATE)
_ALPHANUMERIC, _DIGIT, _WHITESPACE, _BRACKET, _IN_URL = (
    np.uint8(1 << bit) for bit in range(5)
)


_BYTE_CLASSES = np.bitwise_or.reduce(
    [
        flag * byte_table(members)
        for flag, members in (
            (_ALPHANUMERIC, ascii_letters + digits + "\n?!,."),
            (_DIGIT, digits),
            (_WHITESPACE, " \t\n\r\b"),
            (_BRACKET, "()[]{}"),
            (_IN_URL, ascii_letters + digits + "$-_@.&+!*(),"),
        )
    ]
)
"""Flags of every byte: uint8 of shape (256,)."""
_IS_HEX, _IS_END = byte_table(hexdigits), byte_table(".?!\"'")


def curator_statistics(texts: Column) -> Columns:
    """Measure CURATOR_SHARES, and `longest_word_characters`, of every text.

    Args:
        texts: n strings; null counts as empty.

    Returns:
        statistic -> int64 (`longest_word_characters`) or float64 of shape (n,).

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    data, offsets = text_buffers(texts)
    values = np.ones((len(offsets) - 1, len(CURATOR_SHARES)))
    longest = np.zeros(len(offsets) - 1, np.int64)
    _measure_texts(
        data, offsets, text_classes(), _BOILERPLATE, PLACEHOLDER, values, longest
    )
    return {
        **dict(zip(CURATOR_SHARES, values.T.copy())),
        "longest_word_characters": longest,
    }


RULE_SET = RuleSet(lambda rows, section: curator_statistics(rows["text"]))


@kernel
def _measure_texts(
    data: Bytes,
    offsets: Offsets,
    classes: Flags,
    boilerplate: Phrases,
    placeholder: Phrases,
    values: np.ndarray,
    longest: np.ndarray,
) -> None:
    for text in range(len(longest)):
        begin, end = offsets[text], offsets[text + 1]
        row = values[text]
        total, alphanumeric, digits, white, brackets, in_urls = 0, 0, 0, 0, 0, 0
        word, longest_word, url_end, at = 0, 0, begin, begin
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
            if code == 0x68 and at >= url_end:
                url_end = _end_of_url(data, at, end)
                in_urls += url_end - at
            at += width
        longest[text] = longest_word
        if total:
            row[0], row[1] = (total - alphanumeric) / total, digits / total
            row[2], row[3] = in_urls / total, white / total
            row[4] = brackets / total
        if count_phrases(data, begin, end, placeholder) == 0:
            paragraphs, matching, at = 0, 0, begin
            while at <= end:
                stop = skip_to_newlines(data, at, end, 2)
                paragraphs += 1
                matching += count_phrases(data, at, stop, boilerplate) > 0
                at = stop + 2
            row[5] = matching / paragraphs
        lines, unended, at = 0, 0, begin
        while at < end:
            stop = skip_to_newlines(data, at, end, 1)
            first, last = strip(data, at, stop, classes)
            if first < last:
                lines += 1
                unended += not _IS_END[data[last - 1]]
            at = stop + 1
        if lines:
            row[6] = unended / lines


@kernel
def _end_of_url(data: Bytes, at: int, end: int) -> int:
    """Return the end of the URL that begins here; `at` if there is none. URLs are
    ASCII.
    """
    scheme = at + 4
    for step in range(4):
        if at + step >= end or data[at + step] != (0x68, 0x74, 0x74, 0x70)[step]:
            return at
    if scheme < end and data[scheme] == 0x73:
        scheme += 1
    if (
        end - scheme < 4
        or data[scheme] != 0x3A
        or data[scheme + 1] != 0x2F
        or data[scheme + 2] != 0x2F
    ):
        return at
    first = stop = scheme + 3
    while stop < end:
        if _BYTE_CLASSES[data[stop]] & _IN_URL:
            stop += 1
        elif (
            data[stop] == 0x25
            and stop + 2 < end
            and _IS_HEX[data[stop + 1]]
            and _IS_HEX[data[stop + 2]]
        ):
            stop += 3
        else:
            break
    return stop if stop > first else at
