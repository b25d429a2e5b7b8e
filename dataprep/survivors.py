"""The survivor of every cluster: chosen in one pass, written down, and read back shard by shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.clusters import KeepKey, choose_survivors, connect
from gristmill.dataprep.dedup_plan import Plan
from gristmill.dataprep.documents import read_table, write_table
from gristmill.dataprep.keep_columns import read_columns
from gristmill.dataprep.links import linked_pairs
from gristmill.dataprep.shuffle import open_batches, write_partitions

LARGEST_CLUSTERS = 10
TWIN_COLUMNS = ["cluster", "survivor", "member", "jaccard", "decided_by", "survivor_value", "member_value"]


def decide(plan: Plan, keys: Sequence[KeepKey]) -> dict[str, Any]:
    """Choose the survivor of every cluster, and write down one row per document that is in one.

    Returns:
        `clusters` (how many of two documents or more) and `largest_clusters`.
    """
    documents, component = connect(linked_pairs(plan))
    members = read_columns(plan.inputs, plan.work, plan.numbering, documents, keys)
    chosen = choose_survivors(members.append_column("component", pa.array(component)), keys)
    survivor = chosen["survivor"].to_numpy()
    decisions = chosen.set_column(2, "survivor", pa.array(documents[survivor]))
    decisions = decisions.append_column("document", pa.array(documents))
    decisions = decisions.append_column("member_id", members["id"])
    decisions = decisions.append_column("survivor_id", members["id"].take(pa.array(survivor)))
    write_partitions(plan.path("decisions", "all"), decisions, np.zeros(len(documents), np.int64), 1)
    survivors = decisions.filter(pa.array(documents[survivor] == documents))
    largest = survivors.sort_by([("size", "descending"), ("cluster", "ascending")]).slice(0, LARGEST_CLUSTERS)
    return {
        "clusters": len(survivors),
        "largest_clusters": [
            {"cluster": row["cluster"].hex(), "survivor": row["survivor_id"].hex(), "size": row["size"]}
            for row in largest.to_pylist()
        ],
    }


def decisions_of(plan: Plan, shard: str) -> tuple[pa.Table, np.ndarray]:
    """The decisions about a shard's documents, and their row numbers in it (int64, ascending)."""
    begin, end = plan.numbering.starts[plan.numbering.shards.index(shard) :][:2]
    decisions = open_batches(plan.path("decisions", "all")).read_all()
    documents = decisions["document"].to_numpy()
    first, last = np.searchsorted(documents, [begin, end])
    return decisions.slice(first, last - first), documents[first:last] - begin


def write_clusters(plan: Plan) -> None:
    """Write `clusters.parquet`: one row per duplicate, by cluster and id."""
    parts = []
    for shard in plan.numbering.shards:
        decisions, rows = decisions_of(plan, shard)
        jaccard = read_table(plan.out / shard, ["jaccard"])["jaccard"].take(pa.array(rows))
        parts.append(decisions.append_column("jaccard", jaccard.cast(pa.float64())))
    if not parts:
        return
    twins = pa.concat_tables(parts)
    twins = twins.filter(pa.array(twins["survivor"].to_numpy() != twins["document"].to_numpy()))
    twins = twins.drop_columns(["survivor", "document", "size"])
    twins = twins.rename_columns({"survivor_id": "survivor", "member_id": "member"})
    twins = twins.select(TWIN_COLUMNS)
    write_table(plan.out / "clusters.parquet", twins.sort_by([("cluster", "ascending"), ("member", "ascending")]))
