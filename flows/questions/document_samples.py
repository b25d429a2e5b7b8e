"""Documents for a report to show whole: some that were kept and some that each rule dropped, chosen by chance.

Which ones says a document's id, a hash of its source, place and text: a report of the same data shows the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import ID_BYTES, annotation_stages, read_annotations, read_table, shard_names
from gristmill.flows.questions.explain import describe_values, judgements
from gristmill.flows.questions.threshold_samples import MOST_SHARDS, by_shard
from gristmill.mixtures.sources import INGEST

KEPT_SHOWN, DROPPED_SHOWN = 6, 2
"""Documents that are shown of all that were kept, and of each rule's."""
MOST_GROUPS = 10
"""Rules, those first that dropped most."""
SHOWN_CHARACTERS = 10_000
"""Of a text; the few that are longer are shown to there."""
Group = tuple[str | None, str | None]
"""The step and the rule that dropped a document; twice nothing of what was kept."""
Place = tuple[int, str, int]
"""What decides by chance, shard and row of a document."""


def shown_documents(recipes: Mapping[str, Mapping[str, Any]], inputs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Documents that were kept, from as many sources as there are, and those of the rules that dropped most.

    Args:
        recipes: step -> its recipe.
        inputs: `ingest` and the steps, in their order.

    Returns:
        per group `step` and `rule` (None of what was kept), `documents` of it in the shards that were looked at, and
        `shown`: each with `id`, `source`, `locator`, `characters`, `said` (what was measured and held against it, in
        lines) and `pieces` of its text, see `explain.marked_text`.
    """
    shards = shard_names(inputs[INGEST])
    numbers: Counter[Group] = Counter()
    chosen: dict[tuple[Group, str], list[Place]] = {}
    for shard in shards[:: max(1, -(-len(shards) // MOST_SHARDS))]:
        for group, source, number, places in _groups(inputs, shard):
            numbers[group] += number
            chosen[group, source] = sorted([*chosen.get((group, source), ()), *places])[:KEPT_SHOWN]
    kept: list[Group] = [(None, None)] if (None, None) in numbers else []
    dropped = sorted((group for group in numbers if group[0]), key=lambda group: (-numbers[group], group))
    groups = [*kept, *dropped[:MOST_GROUPS]]
    which = {
        group: _spread(
            [places for (of, _), places in sorted(chosen.items(), key=str) if of == group],
            DROPPED_SHOWN if group[0] else KEPT_SHOWN,
        )
        for group in groups
    }
    shown = _shown(recipes, inputs, {(shard, row) for some in which.values() for _, shard, row in some})
    return [
        {
            "step": group[0],
            "rule": group[1],
            "documents": numbers[group],
            "shown": [shown[shard, row] for _, shard, row in which[group]],
        }
        for group in groups
    ]


def _groups(inputs: Mapping[str, Path], shard: str) -> Iterable[tuple[Group, str, int, list[Place]]]:
    """Of a shard, by what became of documents and by source: how many, and some of them."""
    documents = read_table(inputs[INGEST] / shard, ["id", "source"])
    left = np.ones(len(documents), bool)
    for step in annotation_stages(inputs):
        judged = read_annotations(inputs, shard, step, ["keep", "reason"], documents["id"])
        gone = pc.fill_null(pc.invert(judged["keep"]), False).to_numpy()
        left &= ~gone
        reasons = judged["reason"].cast(pa.string())
        for reason in pc.unique(reasons.filter(pa.array(gone))).to_pylist():
            of_rule = gone & pc.equal(reasons, reason).fill_null(False).to_numpy()
            yield from _by_source((step, reason), documents, np.flatnonzero(of_rule), shard)
    yield from _by_source((None, None), documents, np.flatnonzero(left), shard)


def _by_source(
    group: Group, documents: pa.Table, rows: np.ndarray, shard: str
) -> Iterable[tuple[Group, str, int, list[Place]]]:
    of_group = documents.take(pa.array(rows))
    ids = of_group["id"].combine_chunks()
    keys = np.frombuffer(ids.buffers()[1], ">u8")[ids.offset * ID_BYTES // 8 :][: len(rows) * ID_BYTES // 8 : 2]
    for source in pc.unique(of_group["source"].cast(pa.string())).to_pylist():
        places = np.flatnonzero(pc.equal(of_group["source"].cast(pa.string()), source).to_numpy())
        first = places[np.argsort(keys[places], kind="stable")[:KEPT_SHOWN]]
        yield group, source, len(places), [(int(keys[place]), shard, int(rows[place])) for place in first]


def _spread(lists: list[list[Place]], most: int) -> list[Place]:
    """The first of each list, then the second of each, until there are enough."""
    longest = max(map(len, lists), default=0)
    return [one[at] for at in range(longest) for one in lists if at < len(one)][:most]


def _shown(
    recipes: Mapping[str, Mapping[str, Any]], inputs: Mapping[str, Path], places: Collection[tuple[str, int]]
) -> dict[tuple[str, int], dict[str, Any]]:
    """By shard and row; each shard is read once."""
    shown = {}
    for shard, rows in by_shard(places).items():
        for row, found in zip(rows, judgements(recipes, inputs, shard, rows, whole=True), strict=True):
            last = found["stages"][-1:] if found["outcome"] != "kept" else []
            shown[shard, row] = {
                **{key: found[key] for key in ("id", "source", "locator", "characters")},
                "said": [line for verdict in last for line in describe_values(verdict)],
                "pieces": _beginning(found["text"]),
            }
    return shown


def _beginning(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first SHOWN_CHARACTERS of a text in pieces."""
    found, left = [], SHOWN_CHARACTERS
    for piece in pieces:
        if left > 0:
            found.append({**piece, "text": piece["text"][:left]})
        left -= len(piece["text"])
    return found
