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

import numpy as np

from gristmill.dataprep.filters.gopher_words import (
    DOTS,
    ELLIPSIS,
    HASH,
    StopWords,
    copy_shares,
    count_ellipses,
    count_flag,
    count_marked_lines,
    cut_words,
    find_stop_words,
    is_cut_by_characters,
    set_shares,
    share,
    text_words,
)
from gristmill.dataprep.filters.lines_and_sentences import (
    EACH_NEWLINE,
    EACH_TWO_NEWLINES,
    code_points,
    drop_blank,
    split_segments,
)
from gristmill.dataprep.filters.repetition import (
    LONGEST_NGRAM,
    LONGEST_TOP,
    covered_chars,
    extend_ngrams,
    repeated_words,
    top_ngram,
)
from gristmill.dataprep.langid.language_codes import Languages
from gristmill.dataprep.text.kernels import Bytes, Flags, kernel
from gristmill.dataprep.text.swar import count_byte, count_pattern
from gristmill.dataprep.text.unicode_tables import ALPHABETIC, WORD, byte_table, decode
from gristmill.dataprep.words.tokenise_words import CutTexts
from gristmill.dataprep.words.word_breaks import segmented_words
from gristmill.mixtures.steps.rules import GopherRules

BULLETS = code_points("•●*-")
SPACED_DOTS = np.frombuffer(b". . .", np.uint8)
TOKEN_SEPARATORS = byte_table(" \n\r\t\v\f\0")
"""Bytes at which fastText's `Dictionary::readWord` cuts (src/dictionary.cc of fastText
0.9).
"""
UNDERSCORE = 0x5F


def measure_segmented(
    texts: CutTexts,
    counting: GopherRules,
    languages: Languages,
    stop_words: StopWords,
    quality: np.ndarray,
    repetition: np.ndarray,
) -> None:
    """Measure n texts; the arguments are those of `measure` and of
    `gopher_words.cut_words`.
    """
    segments = texts
    if len(repetition):
        segments = cut_words(
            texts.data, texts.offsets, counting, languages, segmented_words
        )
    has_spaces = np.array(
        [not is_cut_by_characters(counting, language) for language in languages], bool
    )
    measure(texts, segments, has_spaces, stop_words, quality, repetition)


@kernel
def measure(
    texts: CutTexts,
    segments: CutTexts,
    has_spaces: np.ndarray,
    stop_words: StopWords,
    quality: np.ndarray,
    repetition: np.ndarray,
) -> None:
    """Measure n texts.

    Args:
        texts: the texts and their words.
        segments: the same texts and their segments.
        has_spaces: bool of shape (n,): True if tokens are counted instead of words.
        quality: float64 of shape (n, 7) for `gopher.QUALITY_STATISTICS`, or (0, 7).
        repetition: float64 of shape (n, 13) for `gopher.REPETITION_STATISTICS`, or (0,
            13).
    """
    data = texts.data
    for text in range(len(texts.offsets) - 1):
        begin, end = texts.offsets[text], texts.offsets[text + 1]
        _, _, chars, word_flags = text_words(texts, text)
        lines, line_ends = split_segments(data, begin, end, EACH_NEWLINE)
        lines, line_ends = drop_blank(data, lines, line_ends, texts.flags, True)
        if len(quality):
            row = quality[text]
            symbols = count_byte(data, begin, end, HASH)
            symbols += count_ellipses(data, begin, end)
            symbols += count_pattern(data, begin, end, SPACED_DOTS)
            bullets, ellipses = count_marked_lines(
                data,
                lines,
                line_ends,
                texts.flags[:0],
                BULLETS,
                (DOTS, SPACED_DOTS, ELLIPSIS),
            )
            row[0] = (
                count_tokens(data, begin, end, texts.flags)
                if has_spaces[text]
                else len(chars)
            )
            row[1] = share(chars.sum(), len(chars), 0.0)
            lettered = count_flag(word_flags, ALPHABETIC)
            set_shares(
                row, symbols, bullets, ellipses, len(lines), lettered, len(chars), 0.0
            )
            row[6], _ = find_stop_words(texts, text, stop_words)
        if len(repetition):
            row = repetition[text]
            row[0], row[1] = copy_shares(data, lines, line_ends, True, 1.0)
            paragraphs, paragraph_ends = split_segments(
                data, begin, end, EACH_TWO_NEWLINES
            )
            paragraphs, paragraph_ends = drop_blank(
                data, paragraphs, paragraph_ends, texts.flags, True
            )
            row[2], row[3] = copy_shares(data, paragraphs, paragraph_ends, True, 1.0)
            ngram_shares(segments, text, True, row[4:])


@kernel
def count_tokens(data: Bytes, begin: int, end: int, flags: Flags) -> int:
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
def ngram_shares(texts: CutTexts, text: int, longest: bool, shares: np.ndarray) -> None:
    """Write the shares of top (2 to 4) and duplicate (5 to 10) n-grams of one text's
    words.

    Args:
        longest: if several n-grams are equally frequent, take the longest as the top
            one instead of the first.
        shares: float64 of shape (9,), zeros; n-gram n goes to shares[n - 2].
    """
    starts, ends, chars, _ = text_words(texts, text)
    total = chars.sum()
    at, group, copies = repeated_words(texts.data, starts, ends)
    size = 1
    for n in range(2, LONGEST_NGRAM + 1):
        while size < n * texts.per_word[text]:
            at, group, copies = extend_ngrams(at, group)
            size += 1
        if len(at) == 0:
            return
        if n <= LONGEST_TOP:
            top, number = top_ngram(at, group, copies, chars, size, longest)
            shares[n - 2] = number * chars[top : top + size].sum() / total
        else:
            shares[n - 2] = covered_chars(at, chars, size) / total
