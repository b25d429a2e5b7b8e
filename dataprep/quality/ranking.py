"""Selection of the best share of all documents, or of each source's, by one score.

Documents are ordered by (score, tie). The tie is a hash of the id, so that the order of
equal scores depends only on the documents. DuckDB sorts them, on disk if they are many.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

ALL = "all"
"""Group of all documents, if sources are not ranked separately."""

LIMITS = {"memory_limit": "1GB", "threads": 2}
"""Settings of DuckDB, which sorts on disk beyond this memory."""

Scored = Iterable[tuple[Sequence[str], np.ndarray, np.ndarray]]
"""Per shard the source, score (float64, not NaN) and tie (uint64) of every ranked
document.
"""


@dataclass(frozen=True)
class DescribedCut:
    """Cut of a group of documents, for the summary.

    Attributes:
        by: name of the score.
        score: the worst one that is kept.
        kept: number of kept documents.
        of: number of ranked documents.
        tie: largest tie of a kept document with this score, in 16 hexadecimal digits.
    """

    by: str
    score: float
    kept: int
    of: int
    tie: str


@dataclass(frozen=True)
class Cuts:
    """Cuts of all groups by one score; the groups are the sources, or ALL."""

    score: str
    higher_is_better: bool
    per_source: bool
    by_group: dict[str, DescribedCut]


def number_kept(share: float, documents: int) -> int:
    """ceil(share * documents) without binary rounding errors: a tenth of 20 is 2."""
    return math.ceil(round(share * documents, 9))


def rank_documents(
    scored: Scored, score: str, higher_is_better: bool, share: float, per_source: bool
) -> Cuts:
    """Find the cut at the best `share` of each group: its ceil(share * documents)-th
    document.
    """
    import duckdb

    order = "DESC" if higher_is_better else "ASC"
    by_group: dict[str, DescribedCut] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        duckdb.connect(config={**LIMITS, "temp_directory": folder}) as connection,
    ):
        connection.execute(
            "CREATE TABLE documents (name VARCHAR, score DOUBLE, tie UBIGINT)"
        )
        for sources, scores, ties in scored:
            names = pa.array(group_names(sources, per_source), pa.string())
            columns = {"name": names, "score": scores + 0.0, "tie": ties}  # no -0.0
            connection.register("shard", pa.table(columns))
            connection.execute("INSERT INTO documents FROM shard")
        sizes = connection.execute(
            "SELECT name, count(*) FROM documents GROUP BY name ORDER BY name"
        ).fetchall()
        for name, size in sizes:
            kept = number_kept(share, size)
            ((worst, tie),) = connection.execute(
                "SELECT score, tie FROM documents WHERE name = ? "
                f"ORDER BY score {order}, tie LIMIT 1 OFFSET ?",
                [name, kept - 1],
            ).fetchall()
            by_group[name] = DescribedCut(score, worst, kept, size, f"{tie:016x}")
    return Cuts(score, higher_is_better, per_source, by_group)


def kept_by_rank(
    cuts: Cuts, sources: Sequence[str], scores: np.ndarray, ties: np.ndarray
) -> np.ndarray:
    """Return True for documents among the best of their group: bool of shape (n,);
    False for NaN scores.
    """
    kept = np.zeros(len(scores), bool)
    groups = group_names(sources, cuts.per_source)
    for name, cut in cuts.by_group.items():
        is_better = scores > cut.score if cuts.higher_is_better else scores < cut.score
        is_tied = (scores == cut.score) & (ties <= np.uint64(int(cut.tie, 16)))
        kept |= (groups == name) & (is_better | is_tied)
    return kept


def group_names(sources: Sequence[str], per_source: bool) -> np.ndarray:
    """Group of each of n documents: strings as objects of shape (n,)."""
    return np.array(list(sources) if per_source else [ALL] * len(sources), object)
