"""Thresholds and their verdicts. A rule is named after its set and threshold:
`gopher_quality/min_words`.

A threshold `min_x` or `max_x` bounds the statistic x. A value equal to the bound
passes, and so does NaN; a null threshold has no effect. A section with user-defined
statistics has thresholds in mappings, `min: {x: 3}` and `max`; its rules are named the
same way. Rules are tried in the order of the manifest's schema, and the first failed
rule is the reason for a drop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
from pydantic import BaseModel

from gristmill.dataprep.conservation import (
    ANY_EDGES,
    Counted,
    Counts,
    Histograms,
    RuleCounts,
    add_counts,
    balance,
    fit_histograms,
    histogram,
)
from gristmill.mixtures.base import Judging

Side = Literal["min", "max"]
Columns = Mapping[str, np.ndarray]
"""Column -> int64 or float64 of shape (n,); NaN if a statistic does not apply, which
every threshold passes.
"""


@dataclass(frozen=True)
class Bound:
    """One threshold of a section.

    Attributes:
        name: `min_words` in both notations.
        key: in the section: `min_words`, or `min.words` for a mapping.
        side: `min` if smaller values fail, `max` if larger values fail.
        statistic: the bounded statistic.
        value: of the threshold.
    """

    name: str
    key: str
    side: Side
    statistic: str
    value: float


def bounds_of(section: BaseModel) -> Iterator[Bound]:
    """Thresholds set in a section, in order."""
    for name in type(section).model_fields:
        side, _, statistic = name.partition("_")
        # settings of all steps are not thresholds
        if side not in ("min", "max") or name in Judging.model_fields:
            continue
        value = getattr(section, name)
        of_side = cast(Side, side)
        if isinstance(value, Mapping):
            yield from (
                Bound(f"{side}_{inner}", f"{side}.{inner}", of_side, inner, bound)
                for inner, bound in value.items()
            )
        elif isinstance(value, int | float):
            yield Bound(name, name, of_side, statistic, value)


def failures(
    statistics: Columns, thresholds: Mapping[str, BaseModel]
) -> dict[str, np.ndarray]:
    """Documents that fail each rule.

    Args:
        statistics: name -> values of shape (n,).
        thresholds: rule set -> its section; `bounds_of` selects its thresholds, all
            other fields are options.

    Returns:
        rule -> bool of shape (n,), in the order of the rules.
    """
    failed: dict[str, np.ndarray] = {}
    for rule_set, section in thresholds.items():
        for bound in bounds_of(section):
            values = statistics[bound.statistic]
            failed[f"{rule_set}/{bound.name}"] = (
                values < bound.value if bound.side == "min" else values > bound.value
            )
    return failed


def first_failures(failed: Columns, documents: int) -> list[str | None]:
    """First rule that each of n documents fails, or None."""
    reasons: list[str | None] = [None] * documents
    for rule, mask in failed.items():
        for row in np.flatnonzero(mask):
            reasons[row] = reasons[row] or rule
    return reasons


def count_failures(failed: Columns) -> RuleCounts:
    """Count the documents that fail each rule."""
    if not failed:
        return {}
    number_failed: Sequence[int] | np.ndarray = np.sum(list(failed.values()), axis=0)
    return {
        rule: {
            "failing": int(mask.sum()),
            "only": int((mask & (number_failed == 1)).sum()),
        }
        for rule, mask in failed.items()
    }


class MeasuredShard(Counted):
    """Result of measuring the documents of a shard."""

    rules: RuleCounts
    histograms: Histograms


@dataclass(frozen=True)
class MeasuredSummary:
    """Summary of measurements.

    Attributes:
        counts: documents by outcome.
        rules: threshold -> documents that fail it (`failing`), and only it (`only`).
        histograms: of each numeric column.
    """

    counts: Counts
    rules: RuleCounts
    histograms: Histograms


def measured_shard(counts: Counts, failed: Columns, numbers: Columns) -> MeasuredShard:
    """Result of a shard from the failed rules (see `failures`) and the numeric columns
    of its documents.
    """
    return {
        "counts": counts,
        "rules": count_failures(failed),
        "histograms": {
            name: histogram(values, ANY_EDGES) for name, values in numbers.items()
        },
    }


def summarize(
    results: Sequence[MeasuredShard], max_quarantined: float, stage: str, out: Path
) -> MeasuredSummary:
    """Summary of all shards, whose annotations are in `out`.

    Raises:
        ConservationError, QuarantineError: see `balance`.
    """
    return MeasuredSummary(
        balance(results, max_quarantined, stage, errors=out),
        add_counts(result["rules"] for result in results),
        fit_histograms(result["histograms"] for result in results),
    )
