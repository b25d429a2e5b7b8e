"""Replaying verdicts: what other thresholds would have done, from the values that were measured, in seconds.

Every rule of a preparing stage that compares one measured number with one setting is a `Rule`: it can be judged again
without reading any text. A setting that changes what is measured (a dialect, a model, a band) has no rule, and changing
it needs a run. Each stage finds its rules itself, beside its work; those of a `min_x` or `max_x` are found here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import read_annotations, read_documents
from gristmill.dataprep.thresholds import Side, bounds_of
from gristmill.mixtures.section import Judging

JUDGEMENT_COLUMNS = ("keep", "reason")
SOURCE = "source"
Columns = Mapping[str, np.ndarray]


class NotReplayableError(ValueError):
    """A setting was changed that no stored value answers for."""


@dataclass(frozen=True)
class Rule:
    """One rule of a stage.

    Attributes:
        name: the reason that is written where a document fails it.
        key: the setting below `prepare`, e.g. `filter.rules.gopher_quality.min_words`.
        statistic: the measured column that is held against the bound.
        bound: the setting's value.
        fails: columns (float64, NaN where there is no value; text as objects) -> bool; a missing value never fails.
        reads: all columns that it looks at; `source` and `id` are those of the documents.
        margins: how far each document is from the cut, where that is not the distance to `bound`.
        side: whether a number as the bound is the least value that passes, or the largest.
        unless: the name of a rule of the same step; what fails that one cannot fail this one.
        part: which documents it judges, where several rules of a step give the same reason: those of a language.
        step: the step's name, where that is not its stage's.
    """

    name: str
    key: str
    statistic: str
    bound: Any
    fails: Callable[[Columns], np.ndarray]
    reads: tuple[str, ...]
    margins: Callable[[Columns], np.ndarray] | None = None
    side: Side = "min"
    unless: str = ""
    part: str = ""
    step: str = ""

    @property
    def label(self) -> str:
        """What tells it from other rules: its name, behind the step's where that has one of its own, and its part."""
        return self.of_step(f"{self.name} ({self.part})" if self.part else self.name)

    def of_step(self, name: str) -> str:
        """The label of the rule of this name in the same step."""
        return f"{self.step}: {name}" if self.step else name

    def dropped(self, summary: Mapping[str, Any]) -> int:
        """How many documents it has dropped, by the summary of its step; `parts` there has part -> reason -> number."""
        parts = summary.get("parts", {})
        counted = parts.get(self.part, {}) if self.part and parts else summary.get("counts", {}).get("dropped", {})
        number: int = counted.get(self.name, 0)
        return number


def short_name(rule: str) -> str:
    """A rule's name or label without its set: `min_words` of `gopher_quality/min_words`, and `min_words (de)` of a rule
    for one language, `de/gopher_quality/min_words`."""
    *before, name = rule.split("/")
    return f"{name} ({before[0]})" if len(before) > 1 else name


@dataclass
class Tally:
    """How often a rule is failed: by documents in all (`failing`), and by documents that fail no other (`only`)."""

    failing: int = 0
    only: int = 0


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on a shard's rows that a stage saw.

    Attributes:
        rows: int64, the rows that the stage saw, ascending.
        keep: bool per row.
        failed: label of a rule -> bool per row.
        columns: statistic -> float64 per row, NaN where nothing was measured.
    """

    rows: np.ndarray
    keep: np.ndarray
    failed: Mapping[str, np.ndarray]
    columns: Columns
    tallies: Mapping[str, Tally] = field(default_factory=dict)


Find = Callable[[str, Any, Collection[str]], Iterator[Rule]]
"""(name of the stage, settings of a step, columns that it measured) -> its rules, in the order in which they are tried:
`rules` of this file, or of the stage's own, which its description names (`flows.stages.stage.Stage`)."""


def remember_last(function: Callable[[Columns], np.ndarray]) -> Callable[[Columns], np.ndarray]:
    """The function with its last result remembered: all rules of a step are given the same columns."""
    last: list[Any] = [None, None]

    def remembering(columns: Columns) -> np.ndarray:
        if last[0] is not columns:
            last[:] = columns, function(columns)
        found: np.ndarray = last[1]
        return found

    return remembering


def rules_of(
    find: Find, stage: str, section: Judging, measured_columns: Collection[str], step: str | None = None
) -> list[Rule]:
    """The replayable rules of a step: those whose columns were measured.

    Args:
        find: the stage's own.
        stage: its name.
        section: the settings.
        measured_columns: of its annotations.
        step: its name, where that is another.
    """
    found = [rule for rule in find(stage, section, measured_columns) if set(rule.reads) <= set(measured_columns)]
    if step is None or step == stage:
        return found
    return [replace(rule, key=f"{step}.{rule.key.partition('.')[2]}", step=step) for rule in found]


def rules(stage: str, section: Judging, measured_columns: Collection[str]) -> Iterator[Rule]:
    """What every setting `min_x` or `max_x` says of the column `x`."""
    yield from threshold_rules(section, stage, stage)


def threshold_rules(section: Any, key: str, prefix: str) -> Iterator[Rule]:
    """The same of any section: its key in the manifest, and what stands before `/min_x` in the reasons."""
    for bound in bounds_of(section):
        yield threshold_rule(f"{prefix}/{bound.name}", f"{key}.{bound.key}", bound.side, bound.statistic, bound.value)


def threshold_rule(name: str, key: str, side: Side, statistic: str, bound: float) -> Rule:
    """The rule that a statistic is at least (`min`) or at most (`max`) so much."""

    def fails(columns: Columns) -> np.ndarray:
        failed: np.ndarray = columns[statistic] < bound if side == "min" else columns[statistic] > bound
        return failed

    return Rule(name, key, statistic, bound, fails, (statistic,), side=side)


def judge_shard(
    inputs: Mapping[str, Path], shard: str, stage: str, before: list[Rule], after: list[Rule]
) -> tuple[Verdicts, Verdicts]:
    """The stored verdicts of a stage on a shard, and those that other bounds would give.

    A document that was quarantined, or dropped for a reason that is not a rule, stays dropped.

    Args:
        before: the rules that the stage ran with.
        after: the same rules with other bounds, or more of them.
    """
    wanted = sorted({name for rule in [*before, *after] for name in rule.reads})
    stored = [name for name in wanted if name != SOURCE]
    table = read_annotations(inputs, shard, stage, [*JUDGEMENT_COLUMNS, *stored])
    if SOURCE in wanted:
        table = table.append_column(SOURCE, read_documents(inputs, shard, [SOURCE])[SOURCE])
    seen = pc.is_valid(table["keep"]).to_numpy(zero_copy_only=False).astype(bool)
    rows = np.flatnonzero(seen).astype(np.int64)
    table = table.take(pa.array(rows))
    kept = table["keep"].to_numpy(zero_copy_only=False).astype(bool)
    reasons = np.array(table["reason"].cast(pa.string()).to_pylist(), object)
    columns = {name: measured(table[name]) for name in wanted}
    fixed = ~kept & ~np.isin(reasons.astype(str), [rule.name for rule in before])
    return tuple(  # type: ignore[return-value]
        _verdicts(rows, columns, rules, fixed) for rules in (before, after)
    )


def _verdicts(rows: np.ndarray, columns: Columns, rules: list[Rule], fixed: np.ndarray) -> Verdicts:
    failed = {rule.label: rule.fails(columns) & ~fixed for rule in rules}
    number = np.sum(list(failed.values()), axis=0) if failed else np.zeros(len(rows), np.int64)
    tallies = {
        name: Tally(int(mask.sum()), int((mask & (number == 1) & ~fixed).sum())) for name, mask in failed.items()
    }
    return Verdicts(rows, ~fixed & (number == 0), failed, columns, tallies)


def measured(column: pa.ChunkedArray) -> np.ndarray:
    """A measured column as float64 with NaN for null; text as objects with None, and so are ids."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_fixed_size_binary(kind):
        return np.array(column.to_pylist(), object)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(column.cast(pa.string()).to_pylist(), object)
    values: np.ndarray = pc.fill_null(column.cast(pa.float64()), math.nan).to_numpy(zero_copy_only=False)
    return values


def nearest(
    verdicts: Verdicts, rule: Rule, most: int, kept: np.ndarray | None = None
) -> dict[str, list[tuple[float, int, float]]]:
    """The documents next to a rule's cut on either side.

    Args:
        kept: bool per row of the verdicts; only documents that are kept in the end count as passing. If absent, a
            document passes if it passes this rule, whatever others say.

    Returns:
        `failing` and `passing`: (distance to the bound, row, value), nearest first.
    """
    if rule.label not in verdicts.failed or not isinstance(rule.bound, int | float):
        return {"failing": [], "passing": []}
    values, failed = verdicts.columns[rule.statistic], verdicts.failed[rule.label]
    passing = ~failed & ~np.isnan(values)
    sides = {"failing": failed, "passing": passing if kept is None else passing & kept}
    found = {}
    for name, mask in sides.items():
        places = np.flatnonzero(mask)
        distance = (np.abs(values - rule.bound) if rule.margins is None else rule.margins(verdicts.columns))[places]
        order = np.lexsort((verdicts.rows[places], distance))[:most]
        found[name] = [(float(distance[at]), int(verdicts.rows[places[at]]), float(values[places[at]])) for at in order]
    return found
