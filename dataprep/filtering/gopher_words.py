"""Which words each Gopher dialect measures: by the dialect, by the manifest, and by the language of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gristmill.dataprep.filtering.punctuated_words import punctuated_words
from gristmill.dataprep.filtering.stop_words import is_unspaced
from gristmill.dataprep.filtering.word_cuts import (
    Words,
    characters_per_word,
    unspaced_words,
    whitespace_words,
    word_punct_words,
)
from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.mixtures.filter import GopherRules

Cut = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Words]
"""`word_cuts.whitespace_words`, or another function with its arguments."""

CUTS: dict[str, Cut] = {
    "dclm": whitespace_words,
    "datatrove": punctuated_words,
    "dolma": whitespace_words,
    "curator": whitespace_words,
    "redpajama": word_punct_words,
}
"""How a dialect cuts the text itself into words (RedPajama has others for the normalised text)."""


def cut_words(
    data: np.ndarray, offsets: np.ndarray, counting: GopherRules, languages: Sequence[str | None],
    cut: Cut | None = None,
) -> tuple[Words, np.ndarray, np.ndarray]:
    """Cut n texts into words.

    Args:
        data, offsets: the texts.
        counting: the dialect and its words.
        languages: one code per text, None where it is not known.
        cut: for texts in scripts with spaces, instead of the dialect's.

    Returns:
        words; places: int64 of shape (n,), the place of each text among theirs; and per_word: uint8 of shape (n,), how
        many of them n-grams take for one (more than one in scripts without spaces).

    Raises:
        gristmill.dataprep.filtering.spacy_words.NoSpacyError: `words: exact` without the package spacy.
    """
    number, flags = len(offsets) - 1, code_point_flags()
    if counting.words == "exact":
        from gristmill.dataprep.filtering.spacy_words import spacy_words

        return spacy_words(data, offsets), np.arange(number), np.ones(number, np.uint8)
    always = counting.words == "unicode"
    unspaced = np.array([always or is_unspaced(language) for language in languages], bool)
    spaced, others = np.flatnonzero(~unspaced), np.flatnonzero(unspaced)
    parts, per_word = [], np.ones(number, np.uint8)
    if len(spaced):
        parts.append((cut or CUTS[counting.dialect])(data, offsets, flags, spaced))
    if len(others):
        parts.append(unspaced_words(data, offsets, flags, others))
        per_word[others] = characters_per_word(data, offsets, flags, others)
    places = np.empty(number, np.int64)
    places[np.concatenate([spaced, others])] = np.arange(number)
    return _concatenate(parts), places, per_word


def _concatenate(parts: Sequence[Words]) -> Words:
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    offsets = np.concatenate([first.offsets, second.offsets[1:] + first.offsets[-1]])
    return Words(offsets, *(np.concatenate(columns) for columns in zip(first[1:], second[1:], strict=True)))
