"""Gopher's statistics as Dolma counts them (python/dolma/taggers/gopher.py, tagger
`gopher_v1`).

| statistic | definition |
|---|---|
| words | whitespace words (`str.split()`) |
| mean_word_length | the *median* of the words' code points |
| symbol_word_ratio | words that contain `#` or `…` (not `...`) / words |
| bullet_line_ratio | lines that begin with `*` or `-` / lines |
| ellipsis_line_ratio | lines that end in `…` / lines |
| alpha_word_ratio | words with a code point of `str.isalpha()` / words |
| stop_words | words that are a stop word in lower case; occurrences |
| duplicate_line_ratio | all copies of repeated lines, the first included / lines |
| duplicate_line_char_ratio | their code points / code points of all *words* |
| duplicate_paragraph_... | none: NaN, which every threshold passes |
| top_n-gram_char_ratio | of the most frequent n-grams the first: copies x code points / code points of all words. No n-gram has to be repeated: a text of n words scores 1 |
| duplicate_n-gram_char_ratio | code points of all repeated n-grams / those of all n-grams; words count once for every n-gram that they are in |

Lines lie between newlines (U+000A) and are not stripped; empty ones count, as lines and
as copies of each other. A share of nothing is 0. Dolma's own mixing configurations cut
`duplicate_line_char_ratio` at 0.30 (Gopher: 0.20), and those of v1.5 and v1.6 name the
top n-grams in a way that no tagger wrote, so that there these three rules never fire.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.filters.gopher_words import (
    ELLIPSIS,
    StopWords,
    count_flag,
    count_marked_lines,
    find_stop_words,
    set_shares,
    text_words,
)
from gristmill.dataprep.filters.lines_and_sentences import (
    EACH_NEWLINE,
    code_points,
    split_segments,
)
from gristmill.dataprep.filters.repetition import (
    LONGEST_NGRAM,
    LONGEST_TOP,
    copied_segments,
    extend_ngrams,
    repeated_words,
    top_ngram,
)
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.unicode_tables import ALPHABETIC, SYMBOL
from gristmill.dataprep.words.tokenise_words import CutTexts

BULLETS = code_points("*-")
COUNTED_LENGTHS = 64


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
        if begin == end:
            if len(repetition):
                repetition[text, 2] = repetition[text, 3] = np.nan
            continue
        starts, ends, chars, word_flags = text_words(texts, text)
        lines, line_ends = split_segments(data, begin, end, EACH_NEWLINE)
        if len(quality):
            row = quality[text]
            bullets, ellipses = count_marked_lines(
                data, lines, line_ends, texts.flags[:0], BULLETS, (ELLIPSIS,)
            )
            row[0] = len(starts)
            row[1] = median_length(chars)
            symbols = count_flag(word_flags, SYMBOL)
            lettered = count_flag(word_flags, ALPHABETIC)
            set_shares(
                row, symbols, bullets, ellipses, len(lines), lettered, len(chars), 0.0
            )
            row[6], _ = find_stop_words(texts, text, stop_words)
        if len(repetition) == 0:
            continue
        row, total = repetition[text], chars.sum()
        number, length = copied_segments(data, lines, line_ends, True)
        row[0], row[1] = number / len(lines), length / max(total, 1)
        row[2] = row[3] = np.nan
        at, group, copies = repeated_words(data, starts, ends)
        size = 1
        for n in range(2, LONGEST_NGRAM + 1):
            while size < n * texts.per_word[text]:
                at, group, copies = extend_ngrams(at, group)
                size += 1
            if len(starts) < size:
                break
            if n <= LONGEST_TOP:
                top, number = top_ngram(at, group, copies, chars, size, False)
                if number == 0:
                    top, number = 0, 1
                row[n + 2] = number * chars[top : top + size].sum() / total
            elif len(at) > 0:
                repeated, mass = 0, 0
                for start in at:
                    repeated += chars[start : start + size].sum()
                # times the number of n-grams that contain the word
                for word in range(len(chars)):
                    mass += chars[word] * min(
                        size, word + 1, len(chars) - word, len(chars) - size + 1
                    )
                row[n + 2] = repeated / mass


@kernel
def median_length(chars: np.ndarray) -> float:
    """Return the median of positive integers; 0 without any."""
    if len(chars) == 0:
        return 0.0
    counts = np.zeros(COUNTED_LENGTHS, np.int64)
    for length in chars:
        counts[min(length, COUNTED_LENGTHS - 1)] += 1
    # The two middle ones, counted from 0, are the same if the number of lengths is odd.
    lower, upper = (len(chars) - 1) // 2, len(chars) // 2
    if upper >= len(chars) - counts[COUNTED_LENGTHS - 1]:
        ordered = np.sort(chars)
        return (ordered[lower] + ordered[upper]) / 2
    total, below = 0, 0
    for length in range(COUNTED_LENGTHS):
        below = length if total <= lower else below
        total += counts[length]
        if total > upper:
            return (below + length) / 2
    return 0.0
