"""The statistics that Gopher's rules judge a document by, one value per document and statistic.

Quality (Rae et al. 2021, section A1.1). The paper names the rules but not how to count; the counting follows DCLM
(baselines/mappers/filters/content_filters.py), whose quality filters are defined on whitespace words:

- words: maximal runs of code points that are not whitespace (`str.split()`).
- mean_word_length: code points of all words / words.
- symbol_word_ratio: occurrences of `#`, `...` (from the left, not overlapping) and `…`, together / words. DCLM also
  counts `. . .`, the paper does not.
- bullet_line_ratio: lines whose first code point that is not whitespace is `•`, `●`, `*` or `-` (DCLM's set) / lines.
- ellipsis_line_ratio: lines that end, trailing whitespace aside, in `...` or `…` / lines.
- alpha_word_ratio: words with at least one code point that is alphabetic (`str.isalpha()`) / words.
- stop_words: words that equal the, be, to, of, and, that, have or with in any case; occurrences, not distinct ones.

Lines are separated by U+000A alone; those of whitespace only are not lines. Repetition is defined in
`repetition.py`. A share of nothing is 0: empty text has zeros everywhere.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.repetition import DUPLICATE_NGRAMS, TOP_NGRAMS, ngram_repetition, segment_repetition
from gristmill.dataprep.spans import find_segments, find_words
from gristmill.dataprep.text_buffers import text_buffers
from gristmill.dataprep.unicode_tables import code_point_flags

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS = ("•", "●", "*", "-")

QUALITY_STATISTICS = (
    "words", "mean_word_length", "symbol_word_ratio", "bullet_line_ratio", "ellipsis_line_ratio", "alpha_word_ratio",
    "stop_words",
)
REPETITION_STATISTICS = (
    "duplicate_line_ratio", "duplicate_line_char_ratio", "duplicate_paragraph_ratio",
    "duplicate_paragraph_char_ratio",
    *(f"top_{n}gram_char_ratio" for n in TOP_NGRAMS),
    *(f"duplicate_{n}gram_char_ratio" for n in DUPLICATE_NGRAMS),
)
COUNTS = ("words", "stop_words")
"""The statistics that are whole numbers (int64); all others are float64."""


def quality_statistics(texts: pa.Array | pa.ChunkedArray) -> dict[str, np.ndarray]:
    """Measure QUALITY_STATISTICS of every text.

    Args:
        texts: n strings; null counts as empty.

    Returns:
        statistic -> int64 or float64 of shape (n,).

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    return _measure(texts, quality=True, repetition=False)


def repetition_statistics(texts: pa.Array | pa.ChunkedArray) -> dict[str, np.ndarray]:
    """Measure REPETITION_STATISTICS of every text; like `quality_statistics`."""
    return _measure(texts, quality=False, repetition=True)


def all_statistics(texts: pa.Array | pa.ChunkedArray) -> dict[str, np.ndarray]:
    """Measure both in one pass; like `quality_statistics`."""
    return _measure(texts, quality=True, repetition=True)


def _measure(texts: pa.Array | pa.ChunkedArray, quality: bool, repetition: bool) -> dict[str, np.ndarray]:
    data, offsets = text_buffers(texts)
    number = len(offsets) - 1
    of_quality = np.zeros((number if quality else 0, len(QUALITY_STATISTICS)))
    of_repetition = np.zeros((number if repetition else 0, len(REPETITION_STATISTICS)))
    _measure_texts(data, offsets, code_point_flags(), of_quality, of_repetition)
    columns: dict[str, np.ndarray] = {}
    if quality:
        columns.update(zip(QUALITY_STATISTICS, of_quality.T.copy()))
    if repetition:
        columns.update(zip(REPETITION_STATISTICS, of_repetition.T.copy()))
    return {name: values.astype(np.int64) if name in COUNTS else values for name, values in columns.items()}


@kernel
def _measure_texts(
    data: np.ndarray, offsets: np.ndarray, flags: np.ndarray, quality: np.ndarray, repetition: np.ndarray
) -> None:
    for text in range(len(offsets) - 1):
        begin, end = offsets[text], offsets[text + 1]
        starts, ends, chars, alphabetic = find_words(data, begin, end, flags)
        line_starts, line_ends, line_chars = find_segments(data, begin, end, flags, 1)
        if len(quality):
            row = quality[text]
            row[0], row[6] = len(starts), _count_stop_words(data, starts, ends)
            if len(starts):
                row[1] = chars.sum() / len(starts)
                row[2] = _count_symbols(data, begin, end) / len(starts)
                row[5] = alphabetic.sum() / len(starts)
            if len(line_starts):
                row[3] = _count_bullets(data, line_starts, line_ends) / len(line_starts)
                row[4] = _count_ellipses(data, line_starts, line_ends) / len(line_starts)
        if len(repetition):
            row = repetition[text]
            row[0], row[1] = segment_repetition(data, line_starts, line_ends, line_chars)
            starts_2, ends_2, chars_2 = find_segments(data, begin, end, flags, 2)
            row[2], row[3] = segment_repetition(data, starts_2, ends_2, chars_2)
            ngram_repetition(data, starts, ends, chars, row[4:])


@kernel
def _count_stop_words(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> int:
    count = 0
    for word in range(len(starts)):
        length = ends[word] - starts[word]
        if length < 2 or length > 4:
            continue
        # The letters of the stop words are ASCII, and so is everything that lower-cases to one of them: setting
        # bit 5 lower-cases a letter and turns no other byte into one.
        packed = 0
        for at in range(starts[word], ends[word]):
            packed = packed << 8 | int(data[at] | 0x20 if data[at] >= 0x40 else data[at])
        for stop_word in _PACKED_STOP_WORDS:
            count += packed == stop_word
    return count


_PACKED_STOP_WORDS = tuple(int.from_bytes(word.encode(), "big") for word in STOP_WORDS)


@kernel
def _count_symbols(data: np.ndarray, begin: int, end: int) -> int:
    count, dots = 0, 0
    for at in range(begin, end):
        byte = data[at]
        dots = dots + 1 if byte == 0x2E else 0
        if dots == 3:
            count, dots = count + 1, 0
        count += byte == 0x23
        count += byte == 0xE2 and data[at + 1] == 0x80 and data[at + 2] == 0xA6  # U+2026
    return count


@kernel
def _count_bullets(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> int:
    count = 0
    for line in range(len(starts)):
        at = starts[line]
        byte = data[at]
        count += byte == 0x2A or byte == 0x2D
        if byte == 0xE2:
            count += data[at + 1] == 0x80 and data[at + 2] == 0xA2  # U+2022
            count += data[at + 1] == 0x97 and data[at + 2] == 0x8F  # U+25CF
    return count


@kernel
def _count_ellipses(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> int:
    count = 0
    for line in range(len(starts)):
        end = ends[line]
        if end - starts[line] < 3:
            continue
        a, b, c = data[end - 3], data[end - 2], data[end - 1]
        count += a == 0x2E and b == 0x2E and c == 0x2E
        count += a == 0xE2 and b == 0x80 and c == 0xA6  # U+2026
    return count
