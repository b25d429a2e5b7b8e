"""Replay of verdicts under other thresholds, from the stored measured values, within
seconds.

A `Rule` compares one measured number with one setting, so it can be judged again
without reading text. A setting that changes what is measured (a dialect, a model, a
band) has no rule, and needs a new run. Each stage lists its rules beside its code; the
rules of settings `min_x` and `max_x` are listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import (
    Inputs,
    as_numbers,
    read_annotations,
)
from gristmill.dataprep.thresholds import Columns, Side, bounds_of, count_failures
from gristmill.mixtures.base import Judging

JUDGEMENT_COLUMNS = ("keep", "reason")
Measure = Callable[[Columns], np.ndarray]


class NotReplayableError(ValueError):
    """A changed setting needs values that were not stored."""


@dataclass(frozen=True)
class Rule:
    """One rule of a stage.

    Attributes:
        name: the reason stored for a document that fails it.
        key: the setting below `prepare`, e.g. `filter.rules.gopher_quality.min_words`.
        statistic: the measured column compared with the bound.
        bound: the setting's value.
        fails: columns (float64, NaN for missing values; text as objects) -> bool; a
            missing value never fails.
        reads: all columns that it uses.
        side: `min` if a numeric bound is the smallest value that passes, `max` if the
            largest.
        unless: name of a rule of the same step; a document that fails that rule cannot
            fail this one.
        part: language of the documents that it judges, if several rules of a step give
            the same reason.
        step: the step's name, if it differs from its stage's.
    """

    name: str
    key: str
    statistic: str
    bound: Any
    fails: Measure
    reads: tuple[str, ...]
    side: Side = "min"
    unless: str = ""
    part: str = ""
    step: str = ""

    @property
    def label(self) -> str:
        """Unique label: the rule's name, after the step's if it has one, with its
        part.
        """
        return self.of_step(f"{self.name} ({self.part})" if self.part else self.name)

    def of_step(self, name: str) -> str:
        """Label of the rule with this name in the same step."""
        return f"{self.step}: {name}" if self.step else name

    def dropped(self, summary: Mapping[str, Any]) -> int:
        """Number of documents that it dropped, from the summary of its step (`parts`:
        part -> reason -> number).
        """
        parts = summary.get("parts", {})
        counted = (
            parts.get(self.part, {})
            if self.part and parts
            else summary.get("counts", {}).get("dropped", {})
        )
        return counted.get(self.name, 0)


def short_name(rule: str) -> str:
    """A rule's name or label without its set: `min_words` of
    `gopher_quality/min_words`, and `min_words (de)` of a rule for one language,
    `de/gopher_quality/min_words`.
    """
    *before, name = rule.split("/")
    return f"{name} ({before[0]})" if len(before) > 1 else name


@dataclass
class Tally:
    """Documents that fail a rule: in all (`failing`), and those that fail no other rule
    (`only`).
    """

    failing: int = 0
    only: int = 0


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on the rows of a shard that reached a stage.

    Attributes:
        rows: int64, ascending, the rows that reached the stage.
        keep: bool per row.
        failed: label of a rule -> bool per row.
        columns: statistic -> float64 per row, NaN for missing values.
    """

    rows: np.ndarray
    keep: np.ndarray
    failed: Columns
    columns: Columns
    tallies: Mapping[str, Tally] = field(default_factory=dict)


Find = Callable[[str, Any, Collection[str]], Iterator[Rule]]
"""(name of the stage, settings of a step, its measured columns) -> its rules in the
order in which they are tried: `rules` below, or the function that the stage's
description names (`flows.stages.stage.Stage`).
"""


def remember_last(
    function: Measure,
) -> Measure:
    """Cache the last result of a function: all rules of a step get the same columns."""
    last: list[Any] = [None, None]

    def remembering(columns: Columns) -> np.ndarray:
        if last[0] is not columns:
            last[:] = columns, function(columns)
        return last[1]

    return remembering


def rules_of(
    find: Find,
    stage: str,
    section: Judging,
    measured_columns: Collection[str],
    step: str | None = None,
) -> list[Rule]:
    """Replayable rules of a step: those whose columns were measured.

    Args:
        find: the stage's function.
        stage: name of the stage.
        section: settings of the step.
        measured_columns: columns of its annotations.
        step: name of the step, if it differs from the stage's.
    """
    step_rules = [
        rule
        for rule in find(stage, section, measured_columns)
        if set(rule.reads) <= set(measured_columns)
    ]
    if step is None or step == stage:
        return step_rules
    return [
        replace(rule, key=f"{step}.{rule.key.partition('.')[2]}", step=step)
        for rule in step_rules
    ]


def rules(
    stage: str, section: Judging, measured_columns: Collection[str]
) -> Iterator[Rule]:
    """Rules of all settings `min_x` and `max_x`, which bound the column `x`."""
    yield from threshold_rules(section, stage, stage)


def threshold_rules(section: Any, key: str, prefix: str) -> Iterator[Rule]:
    """Threshold rules of any section, by its key in the manifest and the prefix of its
    reasons.
    """
    for bound in bounds_of(section):
        yield threshold_rule(
            f"{prefix}/{bound.name}",
            f"{key}.{bound.key}",
            bound.side,
            bound.statistic,
            bound.value,
        )


def threshold_rule(
    name: str, key: str, side: Side, statistic: str, bound: float
) -> Rule:
    """Rule that a statistic is at least (`min`) or at most (`max`) a bound."""

    def fails(columns: Columns) -> np.ndarray:
        return (
            columns[statistic] < bound if side == "min" else columns[statistic] > bound
        )

    return Rule(name, key, statistic, bound, fails, (statistic,), side=side)


def judge_shard(
    inputs: Inputs,
    shard: str,
    stage: str,
    before: list[Rule],
    after: list[Rule],
) -> tuple[Verdicts, Verdicts]:
    """Verdicts of a stage on a shard: the stored ones, and those under other bounds.

    Documents that were quarantined, or dropped for a reason without a rule, stay
    dropped.

    Args:
        before: rules that the stage ran with.
        after: the same rules with other bounds, or more rules.
    """
    statistics = sorted({name for rule in [*before, *after] for name in rule.reads})
    table = read_annotations(inputs, shard, stage, [*JUDGEMENT_COLUMNS, *statistics])
    is_judged = pc.is_valid(table["keep"]).to_numpy()
    rows = np.flatnonzero(is_judged)
    table = table.take(rows)
    kept = table["keep"].to_numpy()
    reasons = np.array(table["reason"].cast(pa.string()).to_pylist(), object)
    columns = {name: measured(table[name]) for name in statistics}
    fixed = ~kept & ~np.isin(reasons.astype(str), [rule.name for rule in before])
    verdicts: list[Verdicts] = []
    for stage_rules in (before, after):
        failed = {rule.label: rule.fails(columns) & ~fixed for rule in stage_rules}
        keep = ~fixed & ~np.any([*failed.values(), np.zeros(len(rows), bool)], axis=0)
        tallies = {
            name: Tally(**numbers) for name, numbers in count_failures(failed).items()
        }
        verdicts.append(Verdicts(rows, keep, failed, columns, tallies))
    return verdicts[0], verdicts[1]


def measured(column: pa.ChunkedArray) -> np.ndarray:
    """A measured column as float64 with NaN for null; text as objects with None."""
    kind = (
        column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    )
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(column.cast(pa.string()).to_pylist(), object)
    return as_numbers(column)


def nearest(
    verdicts: Verdicts, rule: Rule, most: int, kept: np.ndarray | None = None
) -> dict[str, list[tuple[float, int, float]]]:
    """Documents closest to a rule's cut on either side.

    Args:
        kept: bool per row of the verdicts, True for documents that count as passing. If
            None, a document passes if it passes this rule.

    Returns:
        `failing` and `passing`: (distance to the bound, row, value), nearest first.
    """
    if rule.label not in verdicts.failed or not isinstance(rule.bound, int | float):
        return {"failing": [], "passing": []}
    values = verdicts.columns[rule.statistic]
    failed = verdicts.failed[rule.label]
    passing = ~failed & ~np.isnan(values)
    sides = {"failing": failed, "passing": passing if kept is None else passing & kept}
    examples = {}
    for name, mask in sides.items():
        places = np.flatnonzero(mask)
        distance = np.abs(values - rule.bound)[places]
        order = np.lexsort((verdicts.rows[places], distance))[:most]
        examples[name] = [
            (
                float(distance[place]),
                int(verdicts.rows[places[place]]),
                float(values[places[place]]),
            )
            for place in order
        ]
    return examples
