"""Which examples the preparation took for near-duplicates of others, for people to judge whether they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_table, shard_names
from gristmill.dataprep.examples.survivors import DOCUMENTS, PREPARED
from gristmill.dataprep.files import read_json

CLUSTERS = "clusters.parquet"
SHOWN = 5
EXCERPT = 300
"""Characters of an example's text."""


def least_alike(prepared: Path) -> list[dict[str, Any]]:
    """The dropped examples that resemble what was kept in their place the least, those first; at most SHOWN.

    Args:
        prepared: output of `sft_prepare` or `dpo_prepare`.

    Returns:
        per example `dropped` and `kept` (locators), `jaccard`, `dropped_text` and `kept_text` (what the step compared,
        their beginnings). Equal ones are left out; nothing where no step looked for duplicates.
    """
    view = next((step["judges"] for step in read_json(prepared / PREPARED)["steps"] if step["stage"] == "dedup"), None)
    if view is None:
        return []
    columns = ["member_locator", "survivor_locator", "jaccard"]
    table = read_table(prepared / "dedup" / CLUSTERS, columns)
    near = table.filter(pc.less(table["jaccard"], 1.0)).sort_by([(name, "ascending") for name in reversed(columns)])
    found = near.slice(0, SHOWN).to_pylist()
    texts = _texts(prepared / DOCUMENTS / view, {one[name] for one in found for name in columns[:2]})
    return [{"dropped": one["member_locator"], "kept": one["survivor_locator"], "jaccard": one["jaccard"],
             "dropped_text": texts.get(one["member_locator"], ""), "kept_text": texts.get(one["survivor_locator"], "")}
            for one in found]


def _texts(documents: Path, locators: set[str]) -> dict[str, str]:
    """The beginnings of some documents, by their locators."""
    found: dict[str, str] = {}
    for shard in shard_names(documents) if locators else ():
        table = read_table(documents / shard, ["locator", "text"])
        wanted = table.filter(pc.is_in(table["locator"], pa.array(sorted(locators), table["locator"].type)))
        found |= {one["locator"]: one["text"][:EXCERPT] + ("..." if len(one["text"]) > EXCERPT else "")
                  for one in wanted.to_pylist()}
    return found
