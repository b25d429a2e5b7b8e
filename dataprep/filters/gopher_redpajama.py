"""Gopher's statistics as RedPajama-Data v2 counts them (app/src/core/quality_signals
and core/document.py).

Normalised words are the whitespace words of the text without ASCII punctuation
(`string.punctuation` goes first, so that `don't` is `dont` and `and/or` is `andor`), in
lower case and in Unicode's form NFD. Raw words are those of NLTK's WordPunctTokenizer,
`\\w+|[^\\w\\s]+`.

| statistic | definition |
|---|---|
| words | normalised words |
| mean_word_length | code points of all normalised words / normalised words; NaN without any |
| symbol_word_ratio | `#`, `...` (from the left, not overlapping) and `…` in the text, together / raw words; NaN without any |
| bullet_line_ratio | lines that begin with one of ten bullets (no hyphen, no asterisk; an en dash) / lines; NaN without any |
| ellipsis_line_ratio | lines that end in `...` or `…` / lines; NaN without any |
| alpha_word_ratio | raw words with a letter of `[a-zA-Z]` / raw words; NaN without any |
| stop_words | raw words that are a stop word in lower case; occurrences (RedPajama has longer lists and gives a share) |
| duplicate_line_..., duplicate_paragraph_... | none: NaN, which every threshold passes |
| top_n-gram_char_ratio | of the most frequent n-grams of normalised words the first: copies x code points / code points of all normalised words; 0 where no n-gram is repeated |
| duplicate_n-gram_char_ratio | code points of the normalised words that repeated n-grams cover, the first copy included, each word once / code points of all normalised words |

Lines end with a newline (U+000A); empty ones count, and they are stripped where marks
are looked for. Shares and mean lengths are rounded to eight decimal places, before they
meet a threshold.
"""

from __future__ import annotations

import string
import unicodedata
from itertools import pairwise

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.dataprep.filters.gopher_dclm import ngram_shares
from gristmill.dataprep.filters.gopher_words import (
    DOTS,
    ELLIPSIS,
    HASH,
    StopWords,
    count_ellipses,
    count_flag,
    count_marked_lines,
    cut_words,
    find_stop_words,
    set_shares,
    share,
    text_words,
)
from gristmill.dataprep.filters.lines_and_sentences import (
    EACH_NEWLINE,
    code_points,
    split_segments,
)
from gristmill.dataprep.langid.language_codes import Languages
from gristmill.dataprep.text.kernels import Bytes, Offsets, kernel
from gristmill.dataprep.text.swar import count_byte
from gristmill.dataprep.text.unicode_tables import LATIN
from gristmill.dataprep.words.tokenise_words import CutTexts, whitespace_words
from gristmill.mixtures.steps.rules import GopherRules

BULLETS = code_points("•‣▶◀◦■□▪▫–")
DECIMALS = 8
"""`PRECISION` of core/constants.py."""
_PUNCTUATION = string.punctuation.encode()


def measure_normalized(
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
    normalized = cut_words(
        *normalize(texts.data, texts.offsets), counting, languages, whitespace_words
    )
    measure(texts, normalized, stop_words, quality, repetition)
    for values in (quality, repetition):
        for row in values:
            row[:] = [round(value, DECIMALS) for value in row.tolist()]


def normalize(data: Bytes, offsets: Offsets) -> tuple[Bytes, Offsets]:
    """Return texts without ASCII punctuation, in lower case and NFD; arguments and
    result are those of `text_buffers`.
    """
    texts = [
        unicodedata.normalize(
            "NFD",
            data[begin:end].tobytes().translate(None, _PUNCTUATION).decode().lower(),
        ).encode()
        for begin, end in pairwise(offsets.tolist())
    ]
    lengths = offsets_of([len(text) for text in texts])
    return np.frombuffer(b"".join(texts), np.uint8), lengths


@kernel
def measure(
    texts: CutTexts,
    normalized: CutTexts,
    stop_words: StopWords,
    quality: np.ndarray,
    repetition: np.ndarray,
) -> None:
    """Measure n texts, without rounding; the arguments are those of
    `gopher_dclm.measure`.

    Args:
        texts: the texts and their raw words.
        normalized: the same texts, normalised.
    """
    data = texts.data
    for text in range(len(texts.offsets) - 1):
        begin, end = texts.offsets[text], texts.offsets[text + 1]
        if len(repetition):
            repetition[text, :4] = np.nan
            ngram_shares(normalized, text, False, repetition[text, 4:])
        if len(quality) == 0:
            continue
        _, _, chars, _ = text_words(normalized, text)
        _, _, _, word_flags = text_words(texts, text)
        lines, line_ends = split_segments(data, begin, end, EACH_NEWLINE)
        if lines[-1] == end:  # nothing after the last newline
            lines, line_ends = lines[:-1], line_ends[:-1]
        bullets, ellipses = count_marked_lines(
            data, lines, line_ends, texts.flags, BULLETS, (DOTS, ELLIPSIS)
        )
        symbols = count_byte(data, begin, end, HASH) + count_ellipses(data, begin, end)
        row = quality[text]
        row[0] = len(chars)
        row[1] = share(chars.sum(), len(chars), np.nan)
        lettered, words = count_flag(word_flags, LATIN), len(word_flags)
        set_shares(row, symbols, bullets, ellipses, len(lines), lettered, words, np.nan)
        row[6], _ = find_stop_words(texts, text, stop_words)
