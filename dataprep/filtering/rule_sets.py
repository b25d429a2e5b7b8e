"""Rule sets of the stage `filter`, with the functions that measure their columns
(`rule_columns.py`).

To add one: add a section with its thresholds as a field of
`mixtures.steps.rules.Rules`, and an entry of the same name here and in `RULE_COLUMNS`.
A field `min_x` or `max_x` of the section bounds the column `x` (see
`dataprep/thresholds.py`); every other field is an option for the measuring function.
Columns are numbers, and no two sets share a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.filtering import (
    gopher,
    rules_c4,
    rules_code,
    rules_curator,
    rules_fineweb,
    rules_running_text,
    rules_urls,
    rules_words,
)
from gristmill.dataprep.words.language_words import language_names
from gristmill.mixtures.steps.rules import Rules, configured_names

Columns = Mapping[str, np.ndarray]
"""Column -> int64 or float64 of shape (n,); NaN if a statistic does not apply, which
every threshold passes.
"""

MeasureRules = Callable[[pa.Table, Rules], Columns]
"""A pure function of n rows and the rules, with the options of the configured sets, to
the columns of those sets.

The rows have the column `text`, and the others that the set reads; a column that no
stage has written is null on every row.
"""


@dataclass(frozen=True)
class RuleSet:
    """Facts that the stage needs about a rule set."""

    measure: MeasureRules
    """Function that measures the columns; sets with the same function are measured by
    one call.
    """
    reads: tuple[str, ...] = ()
    """Further columns that it reads: of the documents (`locator`, `metadata`), or of
    earlier stages (`language`).
    """


def _measure_mc4(rows: pa.Table, rules: Rules) -> Columns:
    assert rules.mc4 is not None
    return rules_c4.mc4_statistics(rows["text"], rules.mc4.paragraph_characters)


def _measure_fineweb(rows: pa.Table, rules: Rules) -> Columns:
    assert rules.fineweb is not None
    languages = language_names(rows) if rules.fineweb.words == "language" else None
    return rules_fineweb.fineweb_statistics(
        rows["text"], rules.fineweb.short_line_characters, languages
    )


def _measure_running_text(rows: pa.Table, rules: Rules) -> Columns:
    assert rules.running_text is not None
    return rules_running_text.running_text_statistics(
        rows["text"], rows["language"].to_pylist()
    )


def _measure_code(rows: pa.Table, rules: Rules) -> Columns:
    assert rules.code is not None
    paths = rules_code.paths_of(
        rows["locator"], rows["metadata"], rules.code.path_field
    )
    return rules_code.code_statistics(rows["text"], paths)


def _measure_urls(rows: pa.Table, rules: Rules) -> Columns:
    assert rules.urls is not None
    return rules_urls.url_statistics(rows, rules.urls)


def _measure_bad_words(rows: pa.Table, rules: Rules) -> Columns:
    assert rules.bad_words is not None
    return rules_words.bad_word_statistics(rows, rules.bad_words)


def _measure_toxicity(rows: pa.Table, rules: Rules) -> Columns:
    assert rules.toxicity is not None
    return rules_words.toxicity_statistics(rows, rules.toxicity)


RULE_SETS: dict[str, RuleSet] = {
    "gopher_quality": RuleSet(gopher.measure, ("language", "script")),
    "gopher_repetition": RuleSet(gopher.measure, ("language", "script")),
    "c4": RuleSet(lambda rows, rules: rules_c4.c4_statistics(rows["text"])),
    "mc4": RuleSet(_measure_mc4),
    "fineweb": RuleSet(_measure_fineweb, ("language", "script")),
    "curator": RuleSet(
        lambda rows, rules: rules_curator.curator_statistics(rows["text"])
    ),
    "running_text": RuleSet(_measure_running_text, ("language",)),
    "code": RuleSet(_measure_code, ("locator", "metadata")),
    "urls": RuleSet(_measure_urls, ("locator", "metadata")),
    "bad_words": RuleSet(_measure_bad_words, ("language",)),
    "toxicity": RuleSet(_measure_toxicity),
}


def configured_sets(rules: Rules) -> dict[str, Any]:
    """Return the enabled rule sets: name -> section, in the order in which `Rules`
    declares them.
    """
    return {name: getattr(rules, name) for name in configured_names(rules)}


def columns_read(rule_sets: Iterable[str]) -> list[str]:
    """Return the columns that rule sets read besides the text, each once."""
    return list(
        dict.fromkeys(column for name in rule_sets for column in RULE_SETS[name].reads)
    )


def measure(
    rows: pa.Table,
    rules: Rules,
    rule_sources: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Measure only the statistics of the configured rule sets.

    Args:
        rows: n rows with `text` and the columns of `columns_read`, and with `source` if
            `rule_sources` is given.
        rule_sources: rule set -> the only sources that it judges, if not all.

    Returns:
        column -> int64 or float64 of shape (n,). A set with `rule_sources` has only
        float64, NaN for other sources.
    """
    configured = configured_sets(rules)
    measured = _measure_all(
        rows, rules, [name for name in configured if name not in rule_sources]
    )
    for name in configured:
        if name not in rule_sources:
            continue
        sources = pa.array(list(rule_sources[name]), pa.string())
        judged = pc.is_in(rows["source"].cast(pa.string()), value_set=sources)
        places = judged.to_numpy().astype(bool)
        for column, values in _measure_all(rows.filter(judged), rules, [name]).items():
            measured[column] = np.full(len(rows), np.nan)
            measured[column][places] = values
    return measured


def _measure_all(
    rows: pa.Table, rules: Rules, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the columns of some of the configured sets, with one call for all that
    have the same function.
    """
    selected = Rules(**{name: getattr(rules, name) for name in names})
    columns: dict[str, np.ndarray] = {}
    for function in dict.fromkeys(RULE_SETS[name].measure for name in names):
        columns |= function(rows, selected)
    return columns
