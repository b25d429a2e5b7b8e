"""Which document of an older corpus a new one is a duplicate of, where there are several."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.duplicates.dedup_plan import Plan
from gristmill.dataprep.duplicates.sketches import load_columns
from gristmill.dataprep.shuffle import read_partition

MATCH_SCHEMA = pa.schema(
    [("document", pa.int64()), ("match_id", pa.binary(ID_BYTES)), ("match_locator", pa.string()),
     ("match_index", pa.string()), ("match_kind", pa.int64()), ("match_jaccard", pa.float64())]
)  # fmt: skip


def spread_to_copies(matches: np.ndarray, jaccard: np.ndarray, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the near matches of a document to the others of its text, which were not compared themselves.

    Args:
        matches: int64 of shape (m, 2), rows (new document, older one).
        jaccard: float64 of shape (m,), their similarities.
        copies: int64 of shape (n, 2), rows (new document, another of the same text).

    Returns:
        the matches of the copies, and their similarities; of each document's matches only the most similar.
    """
    documents, place = np.unique(matches[:, 0], return_inverse=True)
    highest = np.zeros(len(documents))
    np.maximum.at(highest, place, jaccard)
    top = np.flatnonzero(jaccard == highest[place])
    top = top[np.argsort(matches[top, 0], kind="stable")]
    begin, end = (np.searchsorted(matches[top, 0], copies[:, 0], side=side) for side in ("left", "right"))
    number = end - begin
    within = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    rows = top[np.repeat(begin, number) + within]
    return np.stack([np.repeat(copies[:, 1], number), matches[rows, 1]], axis=1), jaccard[rows]


def best_matches(plan: Plan, shard: int) -> pa.Table:
    """Of every document of a shard that matches older ones, the best match.

    An equal text comes before an equal URL, and that before a similar text; then the highest similarity, the index
    that is named first in `against`, and the smallest id decide.

    Returns:
        one row of MATCH_SCHEMA per document, ascending: the older document's id, locator and index (its name), the
        kind of likeness (position in `links.REASONS`) and the Jaccard similarity.
    """
    if not plan.indexes:
        return MATCH_SCHEMA.empty_table()
    found = read_partition([plan.path("matches", task.name) for task in plan.partitions()], shard)
    if not len(found):
        return MATCH_SCHEMA.empty_table()
    older, place = np.unique(found["right"].to_numpy(), return_inverse=True)
    named = load_columns(plan.work, plan.numbering, older, ["id", "locator"])
    rank = np.empty(len(older), np.int64)
    rank[pc.sort_indices(named["id"]).to_numpy()] = np.arange(len(older))
    index = plan.index_of(older)
    documents, kind, jaccard = (found[name].to_numpy() for name in ("left", "kind", "jaccard"))
    order = np.lexsort((rank[place], index[place], -jaccard, kind, documents))
    best = order[np.unique(documents[order], return_index=True)[1]]
    names = np.array([index.name for index in plan.indexes])
    take = pa.array(place[best])
    return pa.table(
        [documents[best], named["id"].take(take), named["locator"].take(take), pa.array(names[index[place[best]]]),
         kind[best], jaccard[best]],
        schema=MATCH_SCHEMA,
    )  # fmt: skip
