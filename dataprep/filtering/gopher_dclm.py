"""Gopher's statistics as DCLM counts them (baselines/mappers/filters/content_filters.py), on whitespace words.

| statistic | definition |
|---|---|
| words | whitespace words (`str.split()`) |
| mean_word_length | code points of all words / words |
| symbol_word_ratio | `#`, `...` (from the left, not overlapping) and `…` in the text, together / words |
| bullet_line_ratio | lines that begin with `•`, `●`, `*` or `-` / lines |
| ellipsis_line_ratio | lines that end in `...` or `…` / lines |
| alpha_word_ratio | words with a code point of `str.isalpha()` / words |
| stop_words | words that are a stop word in any case; occurrences, not distinct ones |
| duplicate_line_ratio, _char_ratio | all copies of repeated lines, the first included / lines; their code points / those of all lines |
| duplicate_paragraph_... | the same for paragraphs |
| top_n-gram_char_ratio | of the most frequent n-grams the longest: copies (overlapping ones too) x code points / code points of all words; 0 where no n-gram is repeated |
| duplicate_n-gram_char_ratio | code points of the words that repeated n-grams cover, the first copy included, each word once / code points of all words |

Lines lie between newlines (U+000A), paragraphs between two of them; both are stripped, and empty ones do not count.
A share of nothing is 0.

Two things are simpler than in DCLM's code: its `words` are those of fastText's tokeniser that begin with a letter or
digit, and its n-grams consist of the words of Unicode's rules (UAX #29) that do; and it counts `. . .` as an ellipsis.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.filtering.gopher_words import (
    StopWords,
    Texts,
    count_ellipses,
    count_flag,
    count_hashes,
    find_stop_words,
    share,
    text_words,
)
from gristmill.dataprep.filtering.lines_and_sentences import (
    EACH_NEWLINE,
    EACH_TWO_NEWLINES,
    drop_blank,
    ends_with,
    segment_chars,
    split_segments,
    starts_with,
)
from gristmill.dataprep.filtering.repetition import (
    LONGEST_NGRAM,
    LONGEST_TOP,
    copied_segments,
    covered_chars,
    extend_ngrams,
    repeated_words,
    top_ngram,
)
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.unicode_tables import ALPHABETIC

BULLETS = np.array([ord(mark) for mark in "•●*-"], np.uint32)
DOTS, ELLIPSIS = np.frombuffer(b"...", np.uint8), np.frombuffer("…".encode(), np.uint8)


@kernel
def measure(
    texts: Texts, stop_words: StopWords, lower: np.ndarray, quality: np.ndarray, repetition: np.ndarray
) -> None:
    """Measure n texts.

    Args:
        lower: `unicode_tables.lower_case()`.
        quality: float64 of shape (n, 7) for `gopher.QUALITY_STATISTICS`, or (0, 7).
        repetition: float64 of shape (n, 13) for `gopher.REPETITION_STATISTICS`, or (0, 13).
    """
    data = texts.data
    for text in range(len(texts.offsets) - 1):
        begin, end = texts.offsets[text], texts.offsets[text + 1]
        starts, ends, chars, seen = text_words(texts, text)
        lines, line_ends = split_segments(data, begin, end, EACH_NEWLINE)
        lines, line_ends = drop_blank(data, lines, line_ends, texts.flags, True)
        if len(quality):
            row = quality[text]
            occurrences, _ = find_stop_words(data, starts, ends, chars, stop_words, text, lower)
            symbols = count_hashes(data, begin, end) + count_ellipses(data, begin, end)
            bullets, ellipses = 0, 0
            for line in range(len(lines)):
                first, last = lines[line], line_ends[line]
                bullets += starts_with(data, first, last, BULLETS)
                ellipses += ends_with(data, first, last, DOTS) or ends_with(data, first, last, ELLIPSIS)
            row[0] = len(starts)
            row[1] = share(chars.sum(), len(starts), 0.0)
            row[2] = share(symbols, len(starts), 0.0)
            row[3] = share(bullets, len(lines), 0.0)
            row[4] = share(ellipses, len(lines), 0.0)
            row[5] = share(count_flag(seen, ALPHABETIC), len(starts), 0.0)
            row[6] = occurrences
        if len(repetition):
            row = repetition[text]
            row[0], row[1] = _copies(data, lines, line_ends)
            paragraphs, paragraph_ends = split_segments(data, begin, end, EACH_TWO_NEWLINES)
            paragraphs, paragraph_ends = drop_blank(data, paragraphs, paragraph_ends, texts.flags, True)
            row[2], row[3] = _copies(data, paragraphs, paragraph_ends)
            ngram_shares(data, starts, ends, chars, texts.per_word[text], True, row[4:])


@kernel
def _copies(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[float, float]:
    chars = segment_chars(data, starts, ends)
    number, length = copied_segments(data, starts, ends, True)
    return share(number, len(starts), 0.0), share(length, chars.sum(), 0.0)


@kernel
def ngram_shares(
    data: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    chars: np.ndarray,
    per_word: int,
    longest: bool,
    shares: np.ndarray,
) -> None:
    """Write the shares of top (2 to 4) and duplicate (5 to 10) n-grams of one text's words.

    Args:
        per_word: how many of these words an n-gram takes for one.
        longest: whether of equally frequent n-grams the longest is the top one, or else the first.
        shares: float64 of shape (9,), zeros; n-gram n goes to shares[n - 2].
    """
    total = chars.sum()
    at, group, copies = repeated_words(data, starts, ends)
    size = 1
    for n in range(2, LONGEST_NGRAM + 1):
        while size < n * per_word:
            at, group, copies = extend_ngrams(at, group)
            size += 1
        if len(at) == 0:
            return
        if n <= LONGEST_TOP:
            top, number = top_ngram(at, group, copies, chars, size, longest)
            shares[n - 2] = number * chars[top : top + size].sum() / total
        else:
            shares[n - 2] = covered_chars(at, chars, size) / total
