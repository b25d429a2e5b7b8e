"""Thresholds of the stage `filter` for replaying; importing it does not import numba."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from gristmill.dataprep.thresholds import Columns
from gristmill.dataprep.whatif_thresholds import (
    Rule,
    remember_last,
    threshold_rules,
)
from gristmill.mixtures.steps.filter import GENERAL_RULES, RULES_LANGUAGE, Filter


def prefix_of(entry: str) -> str:
    """Return the prefix of the names of an entry's rules; empty for the general
    ones.
    """
    return "" if entry == GENERAL_RULES else f"{entry}/"


def rules(
    stage: str, section: Filter, measured_columns: Collection[str]
) -> Iterator[Rule]:
    """Yield the thresholds of the chosen rule sets, for replaying."""
    rules_of_entry = {**section.by_language, GENERAL_RULES: section.rules}
    numbers = {entry: number for number, entry in enumerate(rules_of_entry)}

    @remember_last
    def judged_by(columns: Columns) -> np.ndarray:
        """Return the number of the entry whose rules judged each document; -1 if no
        rules did.
        """
        return np.array(
            [numbers.get(entry, -1) for entry in columns[RULES_LANGUAGE]], np.int64
        )

    for entry, entry_rules in rules_of_entry.items():
        location = (
            f"{stage}.rules"
            if entry == GENERAL_RULES
            else f"{stage}.by_language.{entry}"
        )
        for name, thresholds in entry_rules.sets.items():
            for rule in threshold_rules(
                thresholds, f"{location}.{name}", prefix_of(entry) + name
            ):
                if not section.by_language:
                    yield rule
                    continue
                fails_in_entry = partial(
                    _fails_in_entry, judged_by, numbers[entry], rule.fails
                )
                yield replace(
                    rule, fails=fails_in_entry, reads=(*rule.reads, RULES_LANGUAGE)
                )


def _fails_in_entry(
    judged_by: Callable[[Columns], np.ndarray],
    number: int,
    fails: Callable[[Columns], np.ndarray],
    columns: Columns,
) -> np.ndarray:
    """Return True for the documents that an entry's rules have judged and that fail a
    rule.
    """
    return fails(columns) & (judged_by(columns) == number)
