"""Random sample of documents shown in a report: some that were kept, and some that each
rule dropped.

Documents are drawn by their ids, which are hashes, so a report of the same data shows
the same documents.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import (
    ID_BYTES,
    annotation_stages,
    read_annotations,
    read_table,
    shard_names,
)
from gristmill.flows.questions.explain import describe_values, judgements
from gristmill.flows.questions.threshold_samples import MOST_SHARDS, by_shard
from gristmill.mixtures.sources import INGEST

KEPT_SHOWN, DROPPED_SHOWN = 6, 2
"""Number of documents shown of those kept, and of those that each rule dropped."""
MOST_GROUPS = 10
"""Number of rules shown, by documents dropped."""
SHOWN_CHARACTERS = 10_000
"""Characters after which a text is cut."""
Group = tuple[str | None, str | None]
"""The step and the rule that dropped a document; (None, None) for kept documents."""
Place = tuple[int, str, int]
"""Random key, shard and row of a document."""


def shown_documents(
    recipes: Mapping[str, Mapping[str, Any]], inputs: Mapping[str, Path]
) -> list[dict[str, Any]]:
    """Sample kept documents from as many sources as possible, and documents of the
    rules that dropped most.

    Args:
        recipes: step -> its recipe.
        inputs: `ingest` and the steps, in order.

    Returns:
        per group `step` and `rule` (None for kept documents), `documents`: its number
        in the sampled shards, and `shown`: each with `id`, `source`, `locator`,
        `characters`, `said` (lines with measured values and thresholds) and `pieces` of
        its text, see `explain.marked_text`.
    """
    shards = shard_names(inputs[INGEST])
    group_sizes: Counter[Group] = Counter()
    candidates: dict[tuple[Group, str], list[Place]] = {}
    for shard in shards[:: max(1, -(-len(shards) // MOST_SHARDS))]:
        for group, source, size, places in _groups(inputs, shard):
            group_sizes[group] += size
            earlier = candidates.get((group, source), [])
            candidates[group, source] = sorted([*earlier, *places])[:KEPT_SHOWN]
    kept: list[Group] = [(None, None)] if (None, None) in group_sizes else []
    dropped = [group for group in group_sizes if group[0]]
    dropped.sort(key=lambda group: (-group_sizes[group], group))
    groups = [*kept, *dropped[:MOST_GROUPS]]

    sampled: dict[Group, list[Place]] = {}
    for group in groups:
        # The first place of each source, then the second of each, and so on.
        ranked = []
        for (of_group, source), places in candidates.items():
            if of_group == group:
                ranked += [(rank, source, place) for rank, place in enumerate(places)]
        limit = DROPPED_SHOWN if group[0] else KEPT_SHOWN
        sampled[group] = [place for _, _, place in sorted(ranked)[:limit]]

    all_places = itertools.chain.from_iterable(sampled.values())
    descriptions = _describe_documents(
        recipes, inputs, {(shard, row) for _, shard, row in all_places}
    )
    return [
        {
            "step": step,
            "rule": rule,
            "documents": group_sizes[step, rule],
            "shown": [descriptions[shard, row] for _, shard, row in places],
        }
        for (step, rule), places in sampled.items()
    ]


def _groups(
    inputs: Mapping[str, Path], shard: str
) -> Iterable[tuple[Group, str, int, list[Place]]]:
    """Yield the groups of a shard by verdict and source, each with its size and a
    sample of places.
    """
    documents = read_table(inputs[INGEST] / shard, ["id", "source"])
    kept = np.ones(len(documents), bool)
    for step in annotation_stages(inputs):
        judged = read_annotations(
            inputs, shard, step, ["keep", "reason"], documents["id"]
        )
        dropped = pc.fill_null(pc.invert(judged["keep"]), False).to_numpy()
        kept &= ~dropped
        reasons = judged["reason"].cast(pa.string())
        for reason in pc.unique(reasons.filter(pa.array(dropped))).to_pylist():
            of_rule = dropped & pc.equal(reasons, reason).fill_null(False).to_numpy()
            yield from _by_source(
                (step, reason), documents, np.flatnonzero(of_rule), shard
            )
    yield from _by_source((None, None), documents, np.flatnonzero(kept), shard)


def _by_source(
    group: Group, documents: pa.Table, rows: np.ndarray, shard: str
) -> Iterable[tuple[Group, str, int, list[Place]]]:
    of_group = documents.take(pa.array(rows))
    ids = of_group["id"].combine_chunks()
    keys = np.frombuffer(ids.buffers()[1], ">u8")[ids.offset * ID_BYTES // 8 :][
        : len(rows) * ID_BYTES // 8 : 2
    ]
    for source in pc.unique(of_group["source"].cast(pa.string())).to_pylist():
        places = np.flatnonzero(
            pc.equal(of_group["source"].cast(pa.string()), source).to_numpy()
        )
        first = places[np.argsort(keys[places], kind="stable")[:KEPT_SHOWN]]
        yield (
            group,
            source,
            len(places),
            [(int(keys[place]), shard, int(rows[place])) for place in first],
        )


def _describe_documents(
    recipes: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, Path],
    places: Collection[tuple[str, int]],
) -> dict[tuple[str, int], dict[str, Any]]:
    """Describe documents by shard and row, reading each shard once."""
    descriptions = {}
    for shard, rows in by_shard(places).items():
        for row, entry in zip(
            rows, judgements(recipes, inputs, shard, rows, with_text=True), strict=True
        ):
            last_verdict = entry["stages"][-1:] if entry["outcome"] != "kept" else []
            beginning, room = [], SHOWN_CHARACTERS
            for piece in entry["text"]:
                if room > 0:
                    beginning.append({**piece, "text": piece["text"][:room]})
                room -= len(piece["text"])
            descriptions[shard, row] = {
                **{
                    key: entry[key] for key in ("id", "source", "locator", "characters")
                },
                "said": [
                    line
                    for verdict in last_verdict
                    for line in describe_values(verdict)
                ],
                "pieces": beginning,
            }
    return descriptions
