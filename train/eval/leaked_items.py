"""Contamination: task items that occur in the training rows, and metrics on those and
on clean items.

Rows read by the pre-training are decoded and searched for word n-grams of the items
(Brown et al. 2020, appendix C, use 13). The search covers the actual training data
after mixing, so it also finds items that decontamination missed or did not look for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from gristmill.dataprep.decontamination.ngram import (
    build_index,
    covered_words,
    find_ngrams,
)
from gristmill.dataprep.shuffle_format import ranges
from gristmill.mixtures.schema.evaluation import Contamination
from gristmill.train.eval.intervals import mean_with_interval
from gristmill.train.loop.objective import JsonObject
from gristmill.train.loop.rows_read import DecodeRows, RowsRead

WORST_ITEMS = 10
"""Most contaminated items that are named."""
MIN_WORDS = 8
"""Items with fewer words are too short to tell from chance; Brown et al. 2020 use the
same.
"""


def item_coverage(
    trained: RowsRead,
    decode: DecodeRows,
    questions: Mapping[str, Sequence[str]],
    section: Contamination,
    seed: int,
) -> dict[str, np.ndarray]:
    """Task -> (items,) share of each item's words in passages that also occur in the
    searched training rows.

    Args:
        trained: rows read by the model.
        decode: rows of ids -> texts.
        questions: task -> texts of its items, with the right answers.
        section: length of a passage, and number of searched rows.
        seed: of the sample of searched rows.
    """
    texts = [text for of_task in questions.values() for text in of_task]
    index = build_index(
        pa.array(texts, pa.large_string()), section.ngram, min(MIN_WORDS, section.ngram)
    )
    ngrams: set[int] = set()
    for passages in trained.texts(trained.drawn(section.rows, seed), decode):
        matches = find_ngrams(pa.array(passages, pa.large_string()), index)
        ngrams.update(np.unique(matches.ngram).tolist())
    numbers = np.array(sorted(ngrams), dtype=np.int64)
    offsets = index.place_offsets
    places = np.sort(index.places[ranges(offsets[numbers], offsets[numbers + 1])])
    covered = covered_words(places, index.part_offsets, index.lengths)
    share = covered / np.maximum(index.counted_words, 1)
    ends = np.cumsum([len(of_task) for of_task in questions.values()])
    return dict(zip(questions, np.split(share, ends[:-1]), strict=True))


def effect(
    share: np.ndarray,
    per_item: Mapping[str, np.ndarray],
    section: Contamination,
    seed: int,
    bootstrap_samples: int,
) -> JsonObject:
    """Effect of contamination on a task.

    Returns:
        `items`; `contaminated`: number of items; `worst`: numbers of the items with the
        largest shares; and `metrics`, each by `contaminated` and `clean` items.
    """
    leaked = share >= section.min_coverage
    worst = np.argsort(-share, kind="stable")[:WORST_ITEMS] + 1
    metrics = {
        name: {
            label: mean_with_interval(values[chosen], seed, bootstrap_samples)
            for label, chosen in (("contaminated", leaked), ("clean", ~leaked))
            if chosen.any()
        }
        for name, values in per_item.items()
    }
    return {
        "items": len(share),
        "contaminated": int(leaked.sum()),
        "worst": worst.tolist() if leaked.any() else [],
        "metrics": metrics,
    }
