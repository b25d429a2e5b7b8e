"""Statistics of the rule set `bad_words`: entries of a language's list in a text.

- bad_words: places of the text where at least one entry of its language's list ends.
  Text and entries are in lower case, code point by code point; in languages that are
  not `unspaced` no word character may be next to the entry, as in the pattern of C4,
  which stops at the first place.
- bad_word_ratio: bytes that belong to entries / bytes of the text in lower case; 0 for
  empty text.

The language is the one that the stage `langid` measured, up to a hyphen, or else the
option `language`. Both statistics of a document whose language has no list are NaN.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.filters.listed_words import (
    Automaton,
    build,
    count,
    lower,
    read_list,
)
from gristmill.dataprep.filters.rule_sets import RuleSet
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.dataprep.thresholds import Columns
from gristmill.mixtures.steps.rules import BadWords


def bad_word_statistics(rows: pa.Table, options: BadWords) -> Columns:
    """Measure `bad_words` and `bad_word_ratio` of n documents (columns `text`,
    `language`): float64 of shape (n,).
    """
    languages = [
        options.language if language is None else language.split("-")[0]
        for language in rows["language"].to_pylist()
    ]
    places, shares = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    for language in sorted(
        {language for language in languages if language in options.lists}
    ):
        rows_of_language = np.flatnonzero([code == language for code in languages])
        texts = lower(rows["text"].take(rows_of_language))
        entries = bad_word_automaton(
            options.lists[language], options.allowed.get(language, ())
        )
        whole_words = language not in options.unspaced
        places[rows_of_language], covered = count(
            *text_buffers(texts), entries, code_point_flags(), whole_words
        )
        sizes = pc.binary_length(texts).to_numpy(zero_copy_only=False)
        shares[rows_of_language] = covered / np.maximum(sizes, 1)
    return {"bad_words": places, "bad_word_ratio": shares}


@lru_cache(maxsize=64)
def bad_word_automaton(path: str, allowed: tuple[str, ...]) -> Automaton:
    """Return the automaton of a list without the allowed entries."""
    return build(entry for entry in read_list(path) if entry not in allowed)


RULE_SET = RuleSet(bad_word_statistics, ("language",))
