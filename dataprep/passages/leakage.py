"""Which texts hold items of evaluation sets, for texts that fit into memory: counted, not dropped.

The same measure, thresholds and reports as the stage `decontaminate`'s (`contamination.py`), without its shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from gristmill.dataprep.passages.contamination import find_matches, is_over
from gristmill.dataprep.passages.evaluation_sets import read_parts
from gristmill.dataprep.passages.ngram_index import build_index, count_documents, find_ngrams
from gristmill.mixtures.decontaminate import Decontaminate


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
    found = [(parts[part].set, parts[part].item, text)
             for part, text in zip(matches.part[over].tolist(), matches.text[over].tolist(), strict=True)]
    return {name: {"items": total, "leaked": len({item for of_set, item, _ in found if of_set == name}),
                   "texts": len({text for of_set, _, text in found if of_set == name})}
            for name, total in items.items()}
