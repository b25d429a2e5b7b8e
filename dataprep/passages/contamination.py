"""How much of each evaluation item a document holds, from the n-grams that they share.

The same measure, thresholds and reports as the stage `decontaminate`'s (`contamination.py`), without its shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.passages.evaluation_sets import read_parts
from gristmill.dataprep.passages.ngram_index import Hits, NgramIndex, build_index, count_documents, covered, find_ngrams
from gristmill.dataprep.shuffle import group_starts, sort_rows, spread_groups
from gristmill.mixtures.steps.decontaminate import Decontaminate

MOST_COPIES = 1000
"""Further copies of one n-gram in one text are not looked at: they change no share, and could fill the memory."""


class Matches(NamedTuple):
    """Pairs of a text and a part (a text of an evaluation item) that share n-grams which count, by text and part.

    Attributes:
        text, part: int64.
        contamination: float64, the share of the part's words that lie in shared n-grams.
        words: int64, the longest run of the part's words that stands in the text as it is.
    """

    text: np.ndarray
    part: np.ndarray
    contamination: np.ndarray
    words: np.ndarray


class Runs(NamedTuple):
    """Runs of words that a text and a part share, by text and part.

    Attributes:
        match: int64, which of the `Matches`. begin, end: int64, bytes in the text. words: int64.
    """

    match: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    words: np.ndarray


def find_matches(hits: Hits, index: NgramIndex, frequent: np.ndarray, certain_coverage: float) -> tuple[Matches, Runs]:
    """Measure every pair of a text and a part that share an n-gram.

    Frequent n-grams count only for parts of which the text holds the share `certain_coverage` or more.

    Args:
        frequent: bool per n-gram of the index.
    """
    hits = _first_copies(hits)
    which = np.repeat(np.arange(len(hits.ngram)), np.diff(index.place_offsets)[hits.ngram])
    place = index.places[_ranges(index.place_offsets[hits.ngram], index.place_offsets[hits.ngram + 1])]
    part = np.searchsorted(index.part_offsets, place, side="right") - 1
    # The same n-gram may stand in a text many times: the share of a part counts it once, by its place in the part.
    everything = _share(hits.text[which], part, place, index)
    counts = everything >= certain_coverage
    counts |= ~frequent[hits.ngram[which]]
    which, place, part = which[counts], place[counts], part[counts]
    text = hits.text[which]
    contamination = _share(text, part, place, index)
    order = sort_rows(text, part, place - hits.word[which], place)
    which, place, part, text, contamination = (values[order] for values in (which, place, part, text, contamination))
    starts = group_starts(text, part)
    match = spread_groups(starts, len(order))
    runs = _runs(hits, which, place, match, index.lengths[part])
    longest = np.zeros(len(starts), np.int64)
    np.maximum.at(longest, runs.match, runs.words)
    return Matches(text[starts], part[starts], contamination[starts], longest), runs


def is_over(matches: Matches, section: Decontaminate) -> np.ndarray:
    """Which matches are more than a document may hold (bool)."""
    over: np.ndarray = (matches.contamination > section.max_contamination) | (
        matches.words > section.max_contamination_words
    )
    return over


def _first_copies(hits: Hits) -> Hits:
    """The hits by text, n-gram and word, at most MOST_COPIES of an n-gram in a text."""
    order = sort_rows(hits.text, hits.ngram, hits.word)
    starts = group_starts(hits.text[order], hits.ngram[order])
    rank = np.arange(len(order)) - starts[spread_groups(starts, len(order))] if len(order) else order
    return Hits._make(column[order[rank < MOST_COPIES]] for column in hits)


def _ranges(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """All numbers from each begin up to its end, one range after the other."""
    sizes = ends - begins
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    result: np.ndarray = np.arange(len(before)) - before + np.repeat(begins, sizes)
    return result


def _share(text: np.ndarray, part: np.ndarray, place: np.ndarray, index: NgramIndex) -> np.ndarray:
    """For each row, the share of its part's words that the rows of the same text and part cover."""
    order = sort_rows(text, part, place)
    group = group_starts(text[order], part[order])
    number = spread_groups(group, len(order))
    new = np.zeros(len(order), bool)
    new[group] = True
    words = np.bincount(number, covered(place[order], index.lengths[part[order]], new), len(group))
    shares = words / np.maximum(index.counted_words[part[order][group]], 1)
    result = np.empty(len(order))
    result[order] = shares[number]
    return result


def _runs(hits: Hits, which: np.ndarray, place: np.ndarray, match: np.ndarray, lengths: np.ndarray) -> Runs:
    """Join n-grams that follow each other both in the text and in the part; rows are sorted so that these do."""
    diagonal = place - hits.word[which]
    follows = np.zeros(len(which), bool)
    follows[1:] = (match[1:] == match[:-1]) & (diagonal[1:] == diagonal[:-1]) & (place[1:] == place[:-1] + 1)
    first = np.flatnonzero(~follows)
    last = np.append(first[1:], len(which)) - 1 if len(first) else first
    return Runs(match[first], hits.begin[which[first]], hits.end[which[last]], last - first + lengths[first])


def leaks_into(texts: Sequence[str], section: Decontaminate) -> dict[str, dict[str, int]]:
    """Count what a set of texts holds of every evaluation set.

    Args:
        texts: n of them; how frequent an n-gram is is counted in these alone.
        section: the evaluation sets, and what counts as holding an item.

    Returns:
        per evaluation set its `items`, how many of these some text holds (`leaked`), and the `texts` that hold one.

    Raises:
        gristmill.dataprep.passages.evaluation_sets.EvaluationSetError: an evaluation set cannot be read.
    """
    parts, items = read_parts(section.against)
    index = build_index(pa.array([part.text for part in parts], pa.large_string()), section.ngram, section.min_words)
    hits = find_ngrams(pa.array(texts, pa.large_string()), index)
    ngrams, documents = count_documents(hits)
    frequent = np.zeros(index.num_ngrams, bool)
    frequent[ngrams] = documents > section.max_document_frequency
    matches, _ = find_matches(hits, index, frequent, section.certain_coverage)
    over = is_over(matches, section)
    found = [
        (parts[part].set, parts[part].item, text)
        for part, text in zip(matches.part[over].tolist(), matches.text[over].tolist(), strict=True)
    ]
    return {
        name: {
            "items": total,
            "leaked": len({item for of_set, item, _ in found if of_set == name}),
            "texts": len({text for of_set, _, text in found if of_set == name}),
        }
        for name, total in items.items()
    }
