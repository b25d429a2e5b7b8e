"""Documents on both sides of each rule's threshold, from stored measurements."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from gristmill.dataprep.documents import Inputs, column_names, shard_names
from gristmill.dataprep.row_groups import read_document_rows
from gristmill.dataprep.whatif_thresholds import Rule, judge_shard, nearest, rules_of
from gristmill.flows.pages.addresses import DOCUMENTS, address
from gristmill.flows.pages.document_elements import id_span
from gristmill.flows.pages.page_elements import Entry, Link, Span, value_text
from gristmill.flows.report.stage_summaries import Binned, StepSummary, read_as
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import prepare_step
from gristmill.flows.stages.stage import imported
from gristmill.mixtures.schema.sources import INGEST

MOST_RULES = 8
SAMPLES = 3
MOST_SHARDS = 50
"""Number of shards, spread evenly, that a report samples; `gristmill whatif` reads
all.
"""
EXCERPT_CHARS = 160


class NearPlace(NamedTuple):
    """A document near the bound of a rule: label of the rule, `failing` or `passing`,
    distance to the bound, shard, row, and measured value.
    """

    label: str
    side: str
    distance: float
    shard: str
    row: int
    value: float


@dataclass(frozen=True)
class CutSample:
    """A document next to a threshold.

    Attributes:
        id: 32 hexadecimal digits.
        source: name of its source.
        locator: file and record in the source.
        excerpt: beginning of its text, on one line.
        value: measured value that the rule bounds.
    """

    id: str
    source: str
    locator: str
    excerpt: str
    value: float

    def entry(self) -> Entry:
        """Return the document as an entry of a list, after its measured value."""
        link = Link(self.locator, address(DOCUMENTS, self.id))
        return Entry(
            [Span(value_text(self.value), "strong"), " ", link],
            [Span(self.excerpt)],
            [self.source, " · ", id_span(self.id)],
        )


@dataclass(frozen=True)
class Samples:
    """Documents nearest to a threshold that fail its rule, and that pass."""

    failing: list[CutSample] = field(default_factory=list)
    passing: list[CutSample] = field(default_factory=list)


@dataclass(frozen=True)
class Cut:
    """A rule that dropped documents.

    Attributes:
        rule: its label.
        key: its setting.
        statistic: the measured column that it bounds.
        bound: the setting's value.
        dropped: number of documents.
        histogram: of the statistic, if its values were counted.
        failing: documents nearest to the bound that fail the rule.
        passing: documents nearest to the bound that pass.
    """

    rule: str
    key: str
    statistic: str
    bound: float
    dropped: int
    histogram: Binned | None
    failing: list[CutSample]
    passing: list[CutSample]


def stored_rules(session: Session, inputs: Inputs) -> dict[str, list[Rule]]:
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
    session: Session, inputs: Inputs, summaries: Mapping[str, Mapping[str, Any]]
) -> list[Cut]:
    """Describe the rules that dropped most documents, most first."""
    dropping = []
    all_rules = stored_rules(session, inputs)
    for stage, rules in all_rules.items():
        for rule in rules:
            dropped = rule.dropped(summaries[stage])
            if dropped and isinstance(rule.bound, int | float):
                dropping.append((dropped, stage, rule))
    dropping.sort(key=lambda item: (-item[0], item[2].label))
    dropping = dropping[:MOST_RULES]
    rules_of_stages = {stage: all_rules[stage] for _, stage, _ in dropping}
    labels = [rule.label for _, _, rule in dropping]
    samples = nearest_samples(inputs, rules_of_stages, labels, SAMPLES)
    return [
        Cut(
            rule.label,
            rule.key,
            rule.statistic,
            rule.bound,
            dropped,
            read_as(StepSummary, summaries[stage]).histograms.get(rule.statistic),
            samples[rule.label].failing,
            samples[rule.label].passing,
        )
        for dropped, stage, rule in dropping
    ]


def nearest_samples(
    inputs: Inputs, rules: Mapping[str, list[Rule]], labels: Collection[str], most: int
) -> dict[str, Samples]:
    """Find the documents nearest to some rules' bounds in at most MOST_SHARDS shards,
    spread evenly.

    Args:
        rules: stage -> all its rules.
        labels: labels of the rules in question.
        most: number of documents on each side of a bound.
    """
    places: list[NearPlace] = []
    shards = shard_names(inputs[INGEST])
    for shard in shards[:: max(1, -(-len(shards) // MOST_SHARDS))]:
        for stage, stage_rules in rules.items():
            verdicts, _ = judge_shard(inputs, shard, stage, stage_rules, stage_rules)
            for rule in stage_rules:
                if rule.label in labels:
                    nearest_rows = nearest(verdicts, rule, most)
                    places += near_places(rule.label, shard, nearest_rows)
    return read_samples(inputs, places, most)


def near_places(
    label: str, shard: str, nearest_rows: Mapping[str, list[tuple[float, int, float]]]
) -> Iterator[NearPlace]:
    """Yield the places of a shard that are nearest to the bound of a rule."""
    for side, entries in nearest_rows.items():
        for distance, row, value in entries:
            yield NearPlace(label, side, distance, shard, row, value)


def read_samples(
    inputs: Inputs, places: Iterable[NearPlace], most: int
) -> dict[str, Samples]:
    """Read the documents nearest to the bound of each rule, at most `most` on each
    side; each shard is read once.
    """
    samples: dict[str, Samples] = defaultdict(Samples)
    chosen: list[NearPlace] = []
    for _, side in itertools.groupby(sorted(places), itemgetter(0, 1)):
        chosen += itertools.islice(side, most)
    documents = {}
    for shard, rows in by_shard({(place.shard, place.row) for place in chosen}).items():
        columns = ["id", "source", "locator", "text"]
        table = read_document_rows(inputs, shard, rows, columns)
        for row, document in zip(rows, table.to_pylist(), strict=True):
            words = document["text"][: 4 * EXCERPT_CHARS].split()
            excerpt = " ".join(words)[:EXCERPT_CHARS]
            origin = document["id"].hex(), document["source"], document["locator"]
            documents[shard, row] = (*origin, excerpt)
    for place in chosen:
        sample = CutSample(*documents[place.shard, place.row], place.value)
        getattr(samples[place.label], place.side).append(sample)
    return samples


def by_shard(places: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Group rows by shard, in order."""
    return {
        shard: [row for _, row in rows]
        for shard, rows in itertools.groupby(sorted(places), itemgetter(0))
    }
