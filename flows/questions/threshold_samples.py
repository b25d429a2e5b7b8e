"""Sample documents on both sides of each rule's threshold, from stored measurements."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gristmill.dataprep.documents import column_names, shard_names
from gristmill.dataprep.row_groups import read_document_rows
from gristmill.dataprep.whatif_thresholds import Rule, judge_shard, nearest, rules_of
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import prepare_step
from gristmill.flows.stages.stage import imported
from gristmill.mixtures.sources import INGEST

MOST_RULES = 8
SAMPLES = 3
MOST_SHARDS = 50
"""Number of shards, spread evenly, that a report samples; `gristmill whatif` reads
all.
"""
EXCERPT_CHARS = 160
Found = tuple[float, str, int, float]
"""Distance to the threshold, shard, row, measured value."""


def stored_rules(session: Session, inputs: Mapping[str, Path]) -> dict[str, list[Rule]]:
    """Return the replayable rules of every committed preparing stage, in pipeline
    order.
    """
    shards = shard_names(inputs[INGEST])
    return {
        name: rules_of(
            imported(prepare_step(step.stage).rules),
            step.stage,
            step.config,
            column_names(inputs[name] / shards[0]) if shards else [],
            name,
        )
        for name, step in session.manifest.steps.items()
        if name in inputs
    }


def describe_cuts(
    session: Session,
    inputs: Mapping[str, Path],
    summaries: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Describe the rules that dropped most: bound, histogram of the statistic, and
    documents next to the threshold.

    Returns:
        per rule: `rule`, `key`, `statistic`, `bound`, `dropped`, `histogram` (or None),
        `failing`, `passing`.
    """
    dropping = []
    for stage, rules in stored_rules(session, inputs).items():
        for rule in rules:
            dropped = rule.dropped(summaries[stage])
            if dropped and isinstance(rule.bound, int | float):
                dropping.append((dropped, stage, rule))
    dropping.sort(key=lambda item: (-item[0], item[2].label))
    dropping = dropping[:MOST_RULES]
    rules_by_stage: dict[str, list[Rule]] = {}
    for _, stage, rule in dropping:
        rules_by_stage.setdefault(stage, []).append(rule)

    samples: dict[str, dict[str, list[Found]]] = {}
    shards = shard_names(inputs[INGEST])
    for shard in shards[:: max(1, -(-len(shards) // MOST_SHARDS))]:
        for stage, rules in rules_by_stage.items():
            verdicts, _ = judge_shard(inputs, shard, stage, rules, rules)
            for rule in rules:
                sides = samples.setdefault(rule.label, {"failing": [], "passing": []})
                merge_nearest(sides, shard, nearest(verdicts, rule, SAMPLES), SAMPLES)
    excerpts = show(inputs, samples)
    return [
        {
            "rule": rule.label,
            "key": rule.key,
            "statistic": rule.statistic,
            "bound": rule.bound,
            "dropped": count,
            "histogram": summaries[stage].get("histograms", {}).get(rule.statistic),
            **excerpts[rule.label],
        }
        for count, stage, rule in dropping
    ]


def merge_nearest(
    sides: dict[str, list[Found]],
    shard: str,
    nearest_in_shard: Mapping[str, list[tuple[float, int, float]]],
    most: int,
) -> None:
    """Merge a shard's nearest documents into those of all shards."""
    for side, entries in nearest_in_shard.items():
        merged = [
            *sides[side],
            *((distance, shard, row, value) for distance, row, value in entries),
        ]
        sides[side] = sorted(merged)[:most]


def show(
    inputs: Mapping[str, Path], samples: Mapping[str, Mapping[str, Sequence[Found]]]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Replace each sample by a description of its document: id, source, locator,
    measured value, and the beginning of its text. Each shard is read once.
    """
    places = set()
    for sides in samples.values():
        for entries in sides.values():
            places |= {(shard, row) for _, shard, row, _ in entries}
    descriptions = {}
    for shard, rows in by_shard(places).items():
        documents = read_document_rows(
            inputs, shard, rows, ["id", "source", "locator", "text"]
        ).to_pylist()
        for row, document in zip(rows, documents, strict=True):
            descriptions[shard, row] = {
                "id": document["id"].hex(),
                "source": document["source"],
                "locator": document["locator"],
                "excerpt": " ".join(document["text"][: 4 * EXCERPT_CHARS].split())[
                    :EXCERPT_CHARS
                ],
            }
    return {
        name: {
            side: [
                {**descriptions[shard, row], "value": value}
                for _, shard, row, value in entries
            ]
            for side, entries in sides.items()
        }
        for name, sides in samples.items()
    }


def by_shard(places: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Group rows by shard, in order."""
    return {
        shard: [row for _, row in rows]
        for shard, rows in itertools.groupby(sorted(places), itemgetter(0))
    }
