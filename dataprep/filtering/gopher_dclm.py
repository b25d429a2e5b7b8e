"""Gopher's statistics as DCLM counts them (mlfoundations/dclm at 361714b,
baselines/mappers/filters/content_filters.py, as
baselines_configs/dclm_baseline_refinedweb.yaml calls it). DCLM cuts a text into words
in three ways:

- tokens: between the seven bytes at which fastText's tokenizer cuts (space, tab, CR,
  LF, VT, FF, NUL), of which those that begin with a letter or digit count;
- words: whitespace words (`str.split()`);
- segments: words of Unicode's rules (UAX #29) that begin with a letter or digit
  (`word_breaks.py`).

| statistic | definition |
|---|---|
| words | tokens |
| mean_word_length | code points of all words / words |
| symbol_word_ratio | `#`, `...`, `. . .` (both from the left, not overlapping) and `…` in the text, together / words |
| bullet_line_ratio | lines that begin with `•`, `●`, `*` or `-` / lines |
| ellipsis_line_ratio | lines that end in `...`, `. . .` or `…` / lines |
| alpha_word_ratio | words with a code point of `str.isalpha()` / words |
| stop_words | words that are a stop word in any case; occurrences, not distinct ones |
| duplicate_line_ratio, _char_ratio | all copies of repeated lines, the first included / lines; their code points / those of all lines |
| duplicate_paragraph_... | the same for paragraphs |
| top_n-gram_char_ratio | of the most frequent n-grams of segments the longest: copies (overlapping ones too) x code points / code points of all segments; 0 where no n-gram is repeated |
| duplicate_n-gram_char_ratio | code points of the segments that repeated n-grams cover, the first copy included, each segment once / code points of all segments |

Lines lie between newlines (U+000A), paragraphs between two of them; both are stripped,
and empty ones do not count. A text without a line, which DCLM drops, is all repetition:
its shares of lines and paragraphs are 1. Otherwise a share of nothing is 0.

In scripts without spaces, which DCLM does not judge, and with `words: unicode`, tokens,
words and segments are all those of `unspaced_words`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gristmill.dataprep.filtering.gopher_words import (
    StopWords,
    Texts,
    count_ellipses,
    count_flag,
    count_hashes,
    cut_words,
    find_stop_words,
    is_cut_by_characters,
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
from gristmill.dataprep.text.unicode_tables import ALPHABETIC, WORD, decode, lower_case
from gristmill.dataprep.words.word_breaks import segmented_words
from gristmill.mixtures.steps.rules import GopherRules

BULLETS = np.array([ord(mark) for mark in "•●*-"], np.uint32)
DOTS, ELLIPSIS = np.frombuffer(b"...", np.uint8), np.frombuffer("…".encode(), np.uint8)
SPACED_DOTS = np.frombuffer(b". . .", np.uint8)
TOKEN_SEPARATORS = np.zeros(256, np.bool_)
TOKEN_SEPARATORS[list(b" \n\r\t\v\f\0")] = True
"""Bytes at which fastText's `Dictionary::readWord` cuts (src/dictionary.cc of fastText
0.9).
"""
UNDERSCORE = 0x5F


def measure_segmented(
    texts: Texts,
    counting: GopherRules,
    languages: Sequence[str | None],
    stop_words: StopWords,
    quality: np.ndarray,
    repetition: np.ndarray,
) -> None:
    """Measure n texts; the arguments are those of `measure` and of
    `gopher_words.cut_words`.
    """
    segments = texts
    if len(repetition):
        words, places, per_word = cut_words(
            texts.data, texts.offsets, counting, languages, segmented_words
        )
        segments = texts._replace(words=words, places=places, per_word=per_word)
    has_spaces = np.array(
        [not is_cut_by_characters(counting, language) for language in languages], bool
    )
    measure(texts, segments, has_spaces, stop_words, lower_case(), quality, repetition)


@kernel
def measure(
    texts: Texts,
    segments: Texts,
    has_spaces: np.ndarray,
    stop_words: StopWords,
    lower: np.ndarray,
    quality: np.ndarray,
    repetition: np.ndarray,
) -> None:
    """Measure n texts.

    Args:
        texts: the texts and their words.
        segments: the same texts and their segments.
        has_spaces: bool of shape (n,): True if tokens are counted instead of words.
        lower: `unicode_tables.lower_case()`.
        quality: float64 of shape (n, 7) for `gopher.QUALITY_STATISTICS`, or (0, 7).
        repetition: float64 of shape (n, 13) for `gopher.REPETITION_STATISTICS`, or (0,
            13).
    """
    data = texts.data
    for text in range(len(texts.offsets) - 1):
        begin, end = texts.offsets[text], texts.offsets[text + 1]
        starts, ends, chars, word_flags = text_words(texts, text)
        lines, line_ends = split_segments(data, begin, end, EACH_NEWLINE)
        lines, line_ends = drop_blank(data, lines, line_ends, texts.flags, True)
        if len(quality):
            row = quality[text]
            occurrences, _ = find_stop_words(
                data, starts, ends, chars, stop_words, text, lower
            )
            symbols = count_hashes(data, begin, end) + count_ellipses(data, begin, end)
            symbols += count_spaced_dots(data, begin, end)
            bullets, ellipses = 0, 0
            for line in range(len(lines)):
                first, last = lines[line], line_ends[line]
                bullets += starts_with(data, first, last, BULLETS)
                dots = ends_with(data, first, last, DOTS) or ends_with(
                    data, first, last, SPACED_DOTS
                )
                ellipses += dots or ends_with(data, first, last, ELLIPSIS)
            row[0] = (
                count_tokens(data, begin, end, texts.flags)
                if has_spaces[text]
                else len(starts)
            )
            row[1] = share(chars.sum(), len(starts), 0.0)
            row[2] = share(symbols, len(starts), 0.0)
            row[3] = share(bullets, len(lines), 0.0)
            row[4] = share(ellipses, len(lines), 0.0)
            row[5] = share(count_flag(word_flags, ALPHABETIC), len(starts), 0.0)
            row[6] = occurrences
        if len(repetition):
            row = repetition[text]
            row[0], row[1] = _copies(data, lines, line_ends)
            paragraphs, paragraph_ends = split_segments(
                data, begin, end, EACH_TWO_NEWLINES
            )
            paragraphs, paragraph_ends = drop_blank(
                data, paragraphs, paragraph_ends, texts.flags, True
            )
            row[2], row[3] = _copies(data, paragraphs, paragraph_ends)
            starts, ends, chars, _ = text_words(segments, text)
            ngram_shares(
                data, starts, ends, chars, segments.per_word[text], True, row[4:]
            )


@kernel
def count_tokens(data: np.ndarray, begin: int, end: int, flags: np.ndarray) -> int:
    """Return the number of fastText's tokens that begin with a letter or digit."""
    count, separated = 0, True
    for at in range(begin, end):
        separates = TOKEN_SEPARATORS[data[at]]
        if separated and not separates:
            code, _ = decode(data, at)
            count += flags[code] & WORD != 0 and code != UNDERSCORE
        separated = separates
    return count


@kernel
def count_spaced_dots(data: np.ndarray, begin: int, end: int) -> int:
    """Return the number of occurrences of `. . .`, from the left and not
    overlapping.
    """
    count, at = 0, begin
    while at + len(SPACED_DOTS) <= end:
        if data[at] == SPACED_DOTS[0] and ends_with(
            data, at, at + len(SPACED_DOTS), SPACED_DOTS
        ):
            count, at = count + 1, at + len(SPACED_DOTS)
        else:
            at += 1
    return count


@kernel
def _copies(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[float, float]:
    chars = segment_chars(data, starts, ends)
    number, length = copied_segments(data, starts, ends, True)
    return share(number, len(starts), 1.0), share(length, chars.sum(), 1.0)


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
    """Write the shares of top (2 to 4) and duplicate (5 to 10) n-grams of one text's
    words.

    Args:
        per_word: number of these words that n-grams count as one word.
        longest: if several n-grams are equally frequent, take the longest as the top
            one instead of the first.
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
