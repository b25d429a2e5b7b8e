"""Random sample of documents shown in a report: some that were kept, and some that each
rule dropped.

Documents are drawn by their ids, which are hashes, so a report of the same data shows
the same documents.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import (
    Inputs,
    annotation_stages,
    read_annotations,
    read_table,
)
from gristmill.flows.questions.explain import Recipes, TextPiece, judgements
from gristmill.flows.questions.threshold_samples import by_shard, some_shards
from gristmill.mixtures.schema.sources import INGEST

KEPT_SHOWN, DROPPED_SHOWN = 6, 2
"""Number of documents shown of those kept, and of those that each rule dropped."""
MOST_GROUPS = 10
"""Number of rules shown, by documents dropped."""
SHOWN_CHARACTERS = 10_000
"""Characters after which a text is cut."""
Group = tuple[str | None, str | None]
"""The step and the rule that dropped a document; (None, None) for kept documents."""
Place = tuple[bytes, str, int]
"""Id, shard and row of a document."""


@dataclass(frozen=True)
class ShownDocument:
    """A document of a sample.

    Attributes:
        id: 32 hexadecimal digits.
        source: name of its source.
        locator: file and record in the source.
        characters: length of its text as read.
        verdict: lines with the measured values and the threshold of the step that
            dropped it.
        pieces: beginning of its text, with its edits.
    """

    id: str
    source: str
    locator: str
    characters: int
    verdict: list[str]
    pieces: list[TextPiece]


@dataclass(frozen=True)
class DocumentGroup:
    """Kept documents, or documents that one rule dropped.

    Attributes:
        step: the step that dropped them; None for kept documents.
        rule: the rule that dropped them; None for kept documents.
        documents: number of such documents in the sampled shards.
        shown: some of them.
    """

    step: str | None
    rule: str | None
    documents: int
    shown: list[ShownDocument]


def shown_documents(recipes: Recipes, inputs: Inputs) -> list[DocumentGroup]:
    """Sample kept documents from as many sources as possible, and documents of the
    rules that dropped most.

    Args:
        recipes: step -> its recipe.
        inputs: `ingest` and the steps, in order.
    """
    group_sizes: Counter[Group] = Counter()
    candidates: dict[Group, dict[str, list[Place]]] = {}
    for shard in some_shards(inputs):
        for group, source, size, places in _groups(inputs, shard):
            group_sizes[group] += size
            by_source = candidates.setdefault(group, {})
            earlier = by_source.get(source, [])
            by_source[source] = sorted([*earlier, *places])[:KEPT_SHOWN]
    kept = [group for group in group_sizes if not group[0]]
    dropped = [group for group in group_sizes if group[0]]
    dropped.sort(key=lambda group: (-group_sizes[group], group))

    sampled: dict[Group, list[Place]] = {}
    for group in (*kept, *dropped[:MOST_GROUPS]):
        # The first place of each source, then the second of each, and so on.
        ranked = []
        for source, places in candidates[group].items():
            ranked += [(rank, source, place) for rank, place in enumerate(places)]
        limit = DROPPED_SHOWN if group[0] else KEPT_SHOWN
        sampled[group] = [place for _, _, place in sorted(ranked)[:limit]]

    samples = {}
    all_places = itertools.chain.from_iterable(sampled.values())
    for shard, rows in by_shard({place[1:] for place in all_places}).items():
        for document in judgements(recipes, inputs, shard, rows, with_text=True):
            pieces, room = [], SHOWN_CHARACTERS
            for piece in document.text:
                if room > 0:
                    pieces.append(replace(piece, text=piece.text[:room]))
                room -= len(piece.text)
            samples[shard, document.row] = ShownDocument(
                document.id,
                document.source,
                document.locator,
                document.characters,
                [] if document.kept else document.stages[-1].lines(),
                pieces,
            )
    return [
        DocumentGroup(
            *group, group_sizes[group], [samples[place[1:]] for place in places]
        )
        for group, places in sampled.items()
    ]


def _groups(
    inputs: Inputs, shard: str
) -> Iterable[tuple[Group, str, int, list[Place]]]:
    """Yield the groups of a shard by verdict and source, each with its size and a
    sample of places.
    """
    documents = read_table(inputs[INGEST] / shard, ["id", "source"])
    steps, rules = np.full((2, len(documents)), None, object)
    for step in annotation_stages(inputs):
        judged = read_annotations(
            inputs, shard, step, ["keep", "reason"], documents["id"]
        )
        dropped = pc.fill_null(pc.invert(judged["keep"]), False).to_numpy()
        steps[dropped] = step
        rules[dropped] = judged["reason"].cast(pa.string()).to_numpy()[dropped]
    table = pa.table(
        {
            "step": pa.array(steps, pa.string()),
            "rule": pa.array(rules, pa.string()),
            "source": documents["source"].cast(pa.string()),
            "row": np.arange(len(documents)),
        }
    )
    groups = (
        table.take(pc.sort_indices(documents["id"]))
        .group_by(["step", "rule", "source"], use_threads=False)
        .aggregate([("row", "list")])
    )
    for group in groups.to_pylist():
        rows = group["row_list"]
        ids = documents["id"].take(pa.array(rows[:KEPT_SHOWN])).to_pylist()
        yield (
            (group["step"], group["rule"]),
            group["source"],
            len(rows),
            [(id_, shard, row) for id_, row in zip(ids, rows, strict=False)],
        )
