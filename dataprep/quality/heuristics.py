"""Heuristic score: how much a document resembles running text, from plain statistics
without training.

The score is the mean of eight marks in [0, 1], each a statistic on a ramp from
suspicious to unquestionable text. The rules of Gopher (Rae et al. 2021), C4 (Raffel et
al. 2020), FineWeb (Penedo et al. 2024) and NeMo Curator drop documents by these
statistics; the ramps start near the thresholds of those rules, and were set once by
hand with DCLM's human labels in view: `gristmill bench quality` reports how well the
score ranks them.

| mark | statistic | none at | full at |
|---|---|---|---|
| length | words, logarithmically | 20 | 1,000 |
| paragraphs | words per line, logarithmically | 3 | 60 |
| sentences | share of characters in lines that end in a terminal mark | 0 | 1 |
| long lines | share of lines of at most 30 characters (FineWeb) | 1 | 0 |
| words with letters | share of words with a letter (Gopher: 0.8) | 0.6 | 1 |
| letters | share of letters in the non-whitespace characters (Curator: 0.75) | 0.7 | 0.97 |
| quiet | share of capitals in the letters (RefinedWeb: lines of capitals) | 0.2 | 0.03 |
| no titles | share of words that begin with a capital | 0.5 | 0.1 |

Words are runs of characters other than whitespace; lines are separated by U+000A, and
blank lines are ignored. In scripts that are written without spaces the first two marks
are low for all documents: compare scores within a language.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa

from gristmill.dataprep.text.kernels import kernel, text_buffers
from gristmill.dataprep.text.unicode_tables import decode, flag_code_points, single

TERMINAL_MARKS = ".!?…\"'”’»。！？।؟։"
SHORT_LINE_CHARACTERS = 30
COUNTS = (
    "characters",
    "letters",
    "capitals",
    "words",
    "words_with_letters",
    "capitalised_words",
    "lines",
    "short_lines",
    "line_characters",
    "sentence_characters",
)
"""Counts of code points other than whitespace, of letters among them, and of capitals
among the letters; of words, words with a letter, and words with an initial capital; of
lines, and lines of at most 30 code points; of code points in lines without surrounding
whitespace, and in those of them that end in a terminal mark.
"""
_SPACE, _LETTER, _CAPITAL, _TERMINAL = (np.uint8(1 << bit) for bit in range(4))


def heuristic_scores(texts: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Score n texts: float64 of shape (n,), in [0, 1]; 0 for a text without words.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    return score_counts(counts_of(texts))


def counts_of(texts: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """COUNTS of n texts: int64 of shape (n, 10).

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    data, offsets = text_buffers(texts)
    return _count(data, offsets, _classes())


def score_counts(counts: np.ndarray) -> np.ndarray:
    """Scores of n texts from their COUNTS, int64 of shape (n, 10)."""
    count = dict(zip(COUNTS, counts.T.astype(np.float64), strict=True))
    words = count["words"]
    lines = count["lines"]
    marks = [
        _ramp(np.log(np.maximum(words, 1)), np.log(20), np.log(1000)),
        _ramp(np.log(np.maximum(_share(words, lines), 1)), np.log(3), np.log(60)),
        _share(count["sentence_characters"], count["line_characters"]),
        1 - _share(count["short_lines"], lines),
        _ramp(_share(count["words_with_letters"], words), 0.6, 1.0),
        _ramp(_share(count["letters"], count["characters"]), 0.7, 0.97),
        _ramp(_share(count["capitals"], count["letters"]), 0.2, 0.03),
        _ramp(_share(count["capitalised_words"], words), 0.5, 0.1),
    ]
    # In this order for any n; the rounding of `np.mean` differs for a single text.
    mean = sum(marks) / len(marks)
    return np.where(words > 0, mean, 0.0)


def _ramp(values: np.ndarray, zero_at: float, one_at: float) -> np.ndarray:
    return np.clip((values - zero_at) / (one_at - zero_at), 0.0, 1.0)


def _share(part: np.ndarray, total: np.ndarray) -> np.ndarray:
    return part / np.maximum(total, 1.0)


@lru_cache(maxsize=1)
def _classes() -> np.ndarray:
    """Character classes as bit flags of every code point: uint8 of shape
    (CODE_POINTS,).
    """
    predicates = (
        (_SPACE, str.isspace),
        (_LETTER, str.isalpha),
        (_CAPITAL, str.isupper),
    )
    classes = flag_code_points(
        np.uint8, predicates, [(_TERMINAL, single(TERMINAL_MARKS))]
    )
    # capitals must be letters (U+24B6 is upper case, but not a letter)
    classes[(classes & _LETTER) == 0] &= ~_CAPITAL
    return classes


@kernel
def _count(data: np.ndarray, offsets: np.ndarray, classes: np.ndarray) -> np.ndarray:
    counts = np.zeros((len(offsets) - 1, 10), np.int64)
    for text in range(len(offsets) - 1):
        row = counts[text]
        in_word = False
        has_letter = False
        # of a line: code points since its first one, up to its last one
        length = 0
        inner = 0
        terminal = False
        position = offsets[text]
        end = offsets[text + 1]
        while position < end:
            code, size = decode(data, position)
            position += size
            kind = classes[code]
            if kind & _SPACE:
                row[4] += in_word and has_letter
                in_word = False
                length += length > 0
                if code == 10:
                    _end_line(row, inner, terminal)
                    length = 0
                    inner = 0
                continue
            if not in_word:
                in_word = True
                has_letter = False
                row[3] += 1
                row[5] += (kind & _CAPITAL) != 0
            length += 1
            inner = length
            terminal = (kind & _TERMINAL) != 0
            row[0] += 1
            if kind & _LETTER:
                has_letter = True
                row[1] += 1
                row[2] += (kind & _CAPITAL) != 0
        row[4] += in_word and has_letter
        _end_line(row, inner, terminal)
    return counts


@kernel
def _end_line(row: np.ndarray, inner: int, terminal: bool) -> None:
    if inner == 0:
        return
    row[6] += 1
    row[7] += inner <= SHORT_LINE_CHARACTERS
    row[8] += inner
    if terminal:
        row[9] += inner
