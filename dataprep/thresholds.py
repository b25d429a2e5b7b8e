"""Thresholds turned into verdicts. A rule is named after its set and threshold: `gopher_quality/min_words`.

A threshold `min_x` or `max_x` bounds the statistic x; the bound itself passes, and so does a statistic that is NaN. A
threshold that is null bounds nothing. A section whose statistics nobody knows beforehand has thresholds in mappings,
`min: {x: 3}` and `max`; the rules are called alike. Rules are tried in the order in which the manifest's schema has
them, and the first one that a document fails is the reason why it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from pydantic import BaseModel

from gristmill.mixtures.section import Judging

Side = Literal["min", "max"]


@dataclass(frozen=True)
class Bound:
    """One threshold of a section.

    Attributes:
        name: `min_words`, whichever way it is written.
        key: as the section has it: `min_words`, or `min.words` of a mapping.
        side: which of the values on the other side of it fail.
        statistic: what it bounds.
        value: itself.
    """

    name: str
    key: str
    side: Side
    statistic: str
    value: float


def bounds_of(section: BaseModel) -> Iterator[Bound]:
    """The thresholds of a section that are given, in their order."""
    for name in type(section).model_fields:
        side, _, statistic = name.partition("_")
        if side not in ("min", "max") or name in Judging.model_fields:  # what all steps have bounds no statistic
            continue
        value, of_side = getattr(section, name), cast(Side, side)
        if isinstance(value, Mapping):
            yield from (
                Bound(f"{side}_{inner}", f"{side}.{inner}", of_side, inner, bound) for inner, bound in value.items()
            )
        elif isinstance(value, int | float):
            yield Bound(name, name, of_side, statistic, value)


def failures(statistics: Mapping[str, np.ndarray], thresholds: Mapping[str, BaseModel]) -> dict[str, np.ndarray]:
    """Which documents fail which rule.

    Args:
        statistics: name -> values of shape (n,).
        thresholds: rule set -> its section; what of it `bounds_of` gives are thresholds, all else are options.

    Returns:
        rule -> bool of shape (n,), in the order of the rules.
    """
    failed: dict[str, np.ndarray] = {}
    for rule_set, section in thresholds.items():
        for bound in bounds_of(section):
            values = statistics[bound.statistic]
            failed[f"{rule_set}/{bound.name}"] = values < bound.value if bound.side == "min" else values > bound.value
    return failed


def bounded_statistics(section: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """The thresholds among a section's fields: name -> (`min` or `max`, statistic)."""
    parts = {name: name.partition("_") for name in section.model_fields}
    return {name: (side, statistic) for name, (side, _, statistic) in parts.items() if side in ("min", "max")}


def first_failures(failed: Mapping[str, np.ndarray], documents: int) -> list[str | None]:
    """The first rule that each of n documents fails, or None."""
    reasons: list[str | None] = [None] * documents
    for rule, mask in failed.items():
        for row in np.flatnonzero(mask):
            reasons[row] = reasons[row] or rule
    return reasons


def count_failures(failed: Mapping[str, np.ndarray]) -> dict[str, dict[str, int]]:
    """Per rule: how many documents fail it (`failing`), and how many fail it and no other (`only`)."""
    if not failed:
        return {}
    number_failed: Sequence[int] | np.ndarray = np.sum(list(failed.values()), axis=0)
    return {
        rule: {"failing": int(mask.sum()), "only": int((mask & (number_failed == 1)).sum())}
        for rule, mask in failed.items()
    }
