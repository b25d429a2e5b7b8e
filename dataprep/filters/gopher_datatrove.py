"""Gopher's statistics as datatrove counts them
(pipeline/filters/gopher_quality_filter.py, gopher_repetition_filter.py and
utils/text.py of version 0.10).

| statistic | definition |
|---|---|
| words | words with a code point outside of datatrove's punctuation set (281 code points) |
| mean_word_length | code points of those words / those words |
| symbol_word_ratio | occurrences of `#`, or those of `...` (from the left, not overlapping) and `…`, whichever are more / *all* words |
| bullet_line_ratio | lines that begin with `•` or `-` / lines |
| ellipsis_line_ratio | lines that end in `...` or `…` / lines |
| alpha_word_ratio | words with a code point of `str.isalpha()` / all words, marks included |
| stop_words | *different* stop words among the words, in lower case |
| duplicate_line_ratio, _char_ratio | copies after the first / lines; their code points / code points of the text |
| duplicate_paragraph_... | the same for paragraphs |
| top_n-gram_char_ratio | of the most frequent n-grams the first: copies x (code points + n - 1) / code points of the text. No n-gram has to be repeated |
| duplicate_n-gram_char_ratio | walking through the words: an n-gram that was seen before counts and is jumped over, any other is noted, and one step on; the code points of those that count / code points of the text. Two are equal if their words are without spaces between them, so that `to day` equals `today` |

Lines of the quality rules are those of `str.splitlines()`, empty ones included,
stripped where marks are looked for. Lines of the repetition rules lie between runs of
newlines (U+000A), so that only the first and the last can be empty; paragraphs lie
between runs of two or more newlines in the stripped text. Nothing is stripped before it
is compared. An empty text, which datatrove drops as `empty`, is all repetition: every
share of it is 1. Otherwise a share of nothing is 0.

Words are those of spaCy's blank English tokenizer, so that every verdict and its reason
is that of datatrove's filters; in a text whose language is written without spaces, each
character of its script is a word.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.filters.gopher_words import (
    DOTS,
    ELLIPSIS,
    HASH,
    StopWords,
    count_ellipses,
    count_flag,
    count_marked_lines,
    find_stop_words,
    set_shares,
    share,
    text_words,
)
from gristmill.dataprep.filters.lines_and_sentences import (
    NEWLINE_RUNS,
    TWO_NEWLINE_RUNS,
    code_points,
    split_lines,
    split_segments,
)
from gristmill.dataprep.filters.repetition import (
    DUPLICATE_NGRAMS,
    LONGEST_TOP,
    copied_chars,
    copied_segments,
    extend_ngrams,
    join_words,
    likely_copies,
    repeated_words,
    shared_starts,
    top_ngram,
)
from gristmill.dataprep.text.kernels import Bytes, kernel
from gristmill.dataprep.text.spans import count_code_points, strip
from gristmill.dataprep.text.swar import count_byte
from gristmill.dataprep.text.unicode_tables import ALPHABETIC, CONTENT
from gristmill.dataprep.words.tokenise_words import CutTexts

BULLETS = code_points("•-")


@kernel
def measure(
    texts: CutTexts,
    stop_words: StopWords,
    quality: np.ndarray,
    repetition: np.ndarray,
) -> None:
    """Measure n texts; the arguments are those of `gopher_dclm.measure`."""
    data = texts.data
    for text in range(len(texts.offsets) - 1):
        begin, end = texts.offsets[text], texts.offsets[text + 1]
        starts, ends, chars, word_flags = text_words(texts, text)
        if len(quality):
            words, length = 0, 0
            for word in range(len(chars)):
                is_content = word_flags[word] & CONTENT != 0
                words += is_content
                length += chars[word] * is_content
            lines, line_ends = split_lines(data, begin, end)
            bullets, ellipses = count_marked_lines(
                data, lines, line_ends, texts.flags, BULLETS, (DOTS, ELLIPSIS)
            )
            symbols = max(
                count_byte(data, begin, end, HASH), count_ellipses(data, begin, end)
            )
            row = quality[text]
            row[0] = words
            row[1] = share(length, words, 0.0)
            lettered = count_flag(word_flags, ALPHABETIC)
            set_shares(
                row, symbols, bullets, ellipses, len(lines), lettered, len(chars), 0.0
            )
            _, row[6] = find_stop_words(texts, text, stop_words)
        if len(repetition) == 0:
            continue
        row, per_word = repetition[text], texts.per_word[text]
        if begin == end:
            row[:] = 1.0
            continue
        total, spaces = count_code_points(data, begin, end), 1 if per_word == 1 else 0
        row[0], row[1] = _later_copies(data, begin, end, NEWLINE_RUNS, total)
        first, last = strip(data, begin, end, texts.flags)
        row[2], row[3] = _later_copies(data, first, last, TWO_NEWLINE_RUNS, total)
        at, group, copies = repeated_words(data, starts, ends)
        size = 1
        for n in range(2, LONGEST_TOP + 1):
            while size < n * per_word:
                at, group, copies = extend_ngrams(at, group)
                size += 1
            top, number = top_ngram(at, group, copies, chars, size, False)
            if number == 0:
                top, number = 0, 1
            if len(starts) >= size:
                top_chars = chars[top : top + size].sum() + spaces * (size - 1)
                row[n + 2] = number * top_chars / total
        joined, offsets = join_words(data, starts, ends)
        shared = shared_starts(joined, offsets)
        candidates = np.arange(len(starts)).astype(np.int32)
        for n in DUPLICATE_NGRAMS:
            size = n * per_word
            candidates = likely_copies(offsets, shared, candidates, size)
            row[n + 2] = copied_chars(joined, offsets, candidates, chars, size) / total


@kernel
def _later_copies(
    data: Bytes, begin: int, end: int, separator: int, total: int
) -> tuple[float, float]:
    starts, ends = split_segments(data, begin, end, separator)
    number, length = copied_segments(data, starts, ends, False)
    return number / len(starts), length / total
