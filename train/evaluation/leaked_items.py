"""Which items of the tasks stand in what was trained on, and how much better a model is at those.

Rows that pre-training has read are decoded and searched for word n-grams of the items (Brown et al. 2020, appendix C,
looks for 13). This looks at what was really trained on, after all mixing: it finds what a decontamination that was not
asked for, or that looked at other files, has left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.passages.ngram_index import NgramIndex, build_index, covered, find_ngrams
from gristmill.mixtures.evaluation import Contamination
from gristmill.train.evaluation.intervals import mean_with_interval
from gristmill.train.evaluation.tasks import Item
from gristmill.train.loop.rows_read import RowsRead

ROWS_AT_A_TIME = 256
MIN_WORDS = 8
"""Items with fewer words are too short to be told from chance; Brown et al. 2020 use the same."""


def item_coverage(
    trained: RowsRead,
    decode: Callable[[Sequence[Sequence[int]]], list[str]],
    items: Mapping[str, Sequence[Item]],
    section: Contamination,
    seed: int,
) -> dict[str, np.ndarray]:
    """Task -> (items,) share of each item's words in passages that the searched training rows hold too.

    Args:
        trained: the rows that the model has read.
        decode: rows of ids -> texts.
        items: task -> its items.
        section: how long a passage is, and how many rows are searched.
        seed: chooses the rows that are searched.
    """
    texts = [item.question for task in items.values() for item in task]
    index = build_index(pa.array(texts, pa.large_string()), section.ngram, min(MIN_WORDS, section.ngram))
    found: set[int] = set()
    rows = trained.drawn(section.rows, seed)
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        read = trained.packed.read(rows[start : start + ROWS_AT_A_TIME]).tolist()
        found.update(np.unique(find_ngrams(pa.array(decode(read), pa.large_string()), index).ngram).tolist())
    share = coverage(index, np.array(sorted(found), dtype=np.int64))
    ends = np.cumsum([len(task) for task in items.values()])
    return dict(zip(items, np.split(share, ends[:-1]), strict=True))


def coverage(index: NgramIndex, ngrams: np.ndarray) -> np.ndarray:
    """Share of each part's words that lie in some of its n-grams (int64, ascending); 0 where none are looked for."""
    place = np.sort(
        np.concatenate(
            [
                np.empty(0, dtype=np.int64),
                *(index.places[index.place_offsets[one] : index.place_offsets[one + 1]] for one in ngrams),
            ]
        )
    )
    part = np.searchsorted(index.part_offsets, place, side="right") - 1
    new = np.diff(part, prepend=-1) != 0
    words = np.bincount(part, covered(place, index.lengths[part], new), len(index.lengths))
    shares: np.ndarray = words / np.maximum(index.counted_words, 1)
    return shares


def effect(
    share: np.ndarray, per_item: Mapping[str, np.ndarray], section: Contamination, seed: int, bootstrap_samples: int
) -> dict[str, Any]:
    """How many items are contaminated, and every metric on those and on the clean ones."""
    leaked = share >= section.min_coverage
    found: dict[str, Any] = {
        "items": len(share),
        "contaminated": int(leaked.sum()),
        "worst": (np.argsort(-share, kind="stable")[:10] + 1).tolist() if leaked.any() else [],
    }
    for name, values in per_item.items():
        found[name] = {
            label: mean_with_interval(values[chosen], seed, bootstrap_samples)
            for label, chosen in (("contaminated", leaked), ("clean", ~leaked))
            if chosen.any()
        }
    return found
