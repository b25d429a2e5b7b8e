"""Contamination of texts by evaluation items, measured by shared n-grams.

The stage `decontaminate` and `leaks_into`, which needs no shards, share this measure
and its thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.decontamination.evaluation_sets import read_parts
from gristmill.dataprep.decontamination.ngram import (
    Hits,
    NgramIndex,
    build_index,
    count_documents,
    covered,
    find_ngrams,
)
from gristmill.dataprep.shuffle_format import (
    group_starts,
    ranges,
    sort_rows,
    spread_groups,
)
from gristmill.mixtures.steps.decontaminate import Decontaminate

MOST_COPIES = 1000
"""Limit of copies of one n-gram in one text; further copies cannot change a share, and
could fill the memory.
"""


class Matches(NamedTuple):
    """Pairs of a text and a part (a text of an evaluation item) that share counted
    n-grams, by text and part.

    Attributes:
        text, part: int64.
        contamination: float64, share of the part's words that lie in shared n-grams.
        words: int64, length of the longest run of the part's words that occurs in the
            text.
    """

    text: np.ndarray
    part: np.ndarray
    contamination: np.ndarray
    words: np.ndarray


class Runs(NamedTuple):
    """Runs of words that a text and a part share, by text and part.

    Attributes:
        match: int64, position in `Matches`. begin, end: int64, bytes in the text.
            words: int64.
    """

    match: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    words: np.ndarray


def find_matches(
    hits: Hits, index: NgramIndex, frequent: np.ndarray, certain_coverage: float
) -> tuple[Matches, Runs]:
    """Measure every pair of a text and a part that share an n-gram.

    Frequent n-grams count only for parts whose words are shared to at least
    `certain_coverage`.

    Args:
        frequent: bool per n-gram of the index.
    """
    order = sort_rows(hits.text, hits.ngram, hits.word)
    starts = group_starts(hits.text[order], hits.ngram[order])
    rank = np.arange(len(order)) - starts[spread_groups(starts, len(order))]
    hits = Hits._make(column[order[rank < MOST_COPIES]] for column in hits)
    hit_rows = np.repeat(
        np.arange(len(hits.ngram)), np.diff(index.place_offsets)[hits.ngram]
    )
    place = index.places[
        ranges(index.place_offsets[hits.ngram], index.place_offsets[hits.ngram + 1])
    ]
    part = np.searchsorted(index.part_offsets, place, side="right") - 1
    # An n-gram may occur in a text many times: the share of a part counts each of its
    # places in the part once.
    certain_shares = _share(hits.text[hit_rows], part, place, index)
    counts = (certain_shares >= certain_coverage) | ~frequent[hits.ngram[hit_rows]]
    hit_rows, place, part = (values[counts] for values in (hit_rows, place, part))
    text = hits.text[hit_rows]
    contamination = _share(text, part, place, index)
    order = sort_rows(text, part, place - hits.word[hit_rows], place)
    hit_rows, place, part, text, contamination = (
        values[order] for values in (hit_rows, place, part, text, contamination)
    )
    starts = group_starts(text, part)
    match = spread_groups(starts, len(order))
    # Join n-grams that are consecutive both in the text and in the part; they are
    # adjacent in the sorted rows.
    first = group_starts(
        match, place - hits.word[hit_rows], place - np.arange(len(place))
    )
    last = np.append(first[1:], len(place))[: len(first)] - 1
    runs = Runs(
        match[first],
        hits.begin[hit_rows[first]],
        hits.end[hit_rows[last]],
        last - first + index.lengths[part[first]],
    )
    longest = np.zeros(len(starts), np.int64)
    np.maximum.at(longest, runs.match, runs.words)
    return Matches(text[starts], part[starts], contamination[starts], longest), runs


def is_over(matches: Matches, section: Decontaminate) -> np.ndarray:
    """Mask of matches that exceed the thresholds (bool)."""
    return (matches.contamination > section.max_contamination) | (
        matches.words > section.max_contamination_words
    )


def _share(
    text: np.ndarray, part: np.ndarray, place: np.ndarray, index: NgramIndex
) -> np.ndarray:
    """Share of the part's words that the rows of the same text and part cover, for each
    row.
    """
    order = sort_rows(text, part, place)
    group = group_starts(text[order], part[order])
    number = spread_groups(group, len(order))
    new = np.zeros(len(order), bool)
    new[group] = True
    words = np.bincount(
        number, covered(place[order], index.lengths[part[order]], new), len(group)
    )
    shares = words / np.maximum(index.counted_words[part[order][group]], 1)
    result = np.empty(len(order))
    result[order] = shares[number]
    return result


def leaks_into(
    texts: Sequence[str], section: Decontaminate
) -> dict[str, dict[str, int]]:
    """Count the items of every evaluation set that leak into some texts.

    Args:
        texts: the texts; frequencies of n-grams are counted in these texts alone.
        section: the evaluation sets and the thresholds of a leak.

    Returns:
        per evaluation set the numbers of its `items`, of `leaked` items, and of `texts`
        with a leaked item.

    Raises:
        gristmill.dataprep.decontamination.evaluation_sets.EvaluationSetError: an evaluation
            set cannot be read.
    """
    parts, items = read_parts(section.against)
    index = build_index(
        pa.array([part.text for part in parts], pa.large_string()),
        section.ngram,
        section.min_words,
    )
    hits = find_ngrams(pa.array(texts, pa.large_string()), index)
    ngrams, documents = count_documents(hits)
    frequent = np.zeros(index.num_ngrams, bool)
    frequent[ngrams] = documents > section.max_document_frequency
    matches, _ = find_matches(hits, index, frequent, section.certain_coverage)
    contaminated = is_over(matches, section)
    leaked: dict[str, set[int]] = {name: set() for name in items}
    leaking_texts: dict[str, set[int]] = {name: set() for name in items}
    for number, text in np.stack([matches.part, matches.text], axis=1)[
        contaminated
    ].tolist():
        part = parts[number]
        leaked[part.set].add(part.item)
        leaking_texts[part.set].add(text)
    return {
        name: {
            "items": total,
            "leaked": len(leaked[name]),
            "texts": len(leaking_texts[name]),
        }
        for name, total in items.items()
    }
