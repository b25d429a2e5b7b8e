"""Rule sets of the stage `filter`: measuring of their columns.

A rule set has a section of `mixtures.steps.rules.Rules`, whose thresholds bound its
columns, and a module of its name in this folder, `<name>.py`, which measures
them. Columns are numbers, and no two sets share a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column
from gristmill.dataprep.conservation import COUNT_EDGES, SHARE_EDGES
from gristmill.dataprep.langid.language_codes import Languages, parse_label
from gristmill.dataprep.thresholds import Columns
from gristmill.mixtures.base import Section
from gristmill.mixtures.steps.rules import Rules, columns_of

Edges = Sequence[float]


@dataclass(frozen=True)
class RuleSet:
    """`RULE_SET` of a module that measures a rule set."""

    measure: Callable[..., Columns]
    """A pure function of n rows and the set's section to the set's columns; sets with
    the same function are measured by one call, with all of their sections.

    The rows have the column `text`, and those of `reads`; a column that no stage has
    written is null on every row.
    """
    reads: tuple[str, ...] = ()
    """Further columns that it reads: of the documents (`locator`, `metadata`), or of
    earlier stages (`language`).
    """
    edges: Mapping[str, Edges] = field(default_factory=dict)
    """Histogram edges of columns that are neither shares, named `..._ratio`, nor
    counts.
    """


def rule_set(name: str) -> RuleSet:
    """Load a rule set from its module; both sets of Gopher are in one."""
    module = "gopher" if name.startswith("gopher_") else name
    return import_module(f"gristmill.dataprep.filters.{module}").RULE_SET


def columns_read(rule_sets: Iterable[str]) -> list[str]:
    """Return the columns that rule sets read besides the text, each once."""
    return list(
        dict.fromkeys(column for name in rule_sets for column in rule_set(name).reads)
    )


def column_edges(rule_sets: Iterable[str]) -> dict[str, Edges]:
    """Return the histogram edges of the columns of some rule sets."""
    return {
        column: rule_set(name).edges.get(
            column, SHARE_EDGES if column.endswith("_ratio") else COUNT_EDGES
        )
        for name in rule_sets
        for column in columns_of(name)
    }


def measure(
    rows: pa.Table,
    rules: Rules,
    rule_sources: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Columns:
    """Measure only the statistics of the configured rule sets.

    Args:
        rows: n rows with `text` and the columns of `columns_read`, and with `source` if
            `rule_sources` is given.
        rule_sources: rule set -> the only sources that it judges, if not all.

    Returns:
        column -> int64 or float64 of shape (n,). A set with `rule_sources` has only
        float64, NaN for other sources.
    """
    of_all_sources = dict(rules.sets)
    of_sources = {
        name: of_all_sources.pop(name) for name in rules.sets if name in rule_sources
    }
    measured = _measure_all(rows, of_all_sources)
    for name, section in of_sources.items():
        sources = pa.array(list(rule_sources[name]), pa.string())
        judged = pc.is_in(rows["source"].cast(pa.string()), value_set=sources)
        measured |= spread(
            _measure_all(rows.filter(judged), {name: section}),
            judged.to_numpy(),
        )
    return measured


def spread(columns: Columns, is_measured: np.ndarray) -> Columns:
    """Return columns of some rows as float64 of all rows, NaN for the others.

    Args:
        is_measured: bool of shape (n,), the rows that the columns have.
    """
    spread_columns = {}
    for name, values in columns.items():
        spread_columns[name] = np.full(len(is_measured), np.nan)
        spread_columns[name][is_measured] = values
    return spread_columns


def measure_by_kernel(
    names: Sequence[str],
    kernel: Callable[..., None],
    texts: Column,
    *arguments: Any,
    fill: float = 0.0,
) -> dict[str, np.ndarray]:
    """Measure k statistics of n texts by a kernel.

    Args:
        names: of the statistics.
        kernel: function of `kernels.text_buffers`, the arguments, and values of shape
            (n, k), which it sets.
        texts: null counts as empty.
        fill: value of statistics that the kernel does not set; its type is theirs.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    from gristmill.dataprep.text.kernels import text_buffers

    values = np.full((len(texts), len(names)), fill)
    kernel(*text_buffers(texts), *arguments, values)
    return dict(zip(names, values.T.copy(), strict=True))


def is_english(languages: Languages) -> np.ndarray:
    """Return True for languages that are English or unknown: bool of shape (n,)."""
    return np.array(
        [
            language is None or parse_label(language).code == "en"
            for language in languages
        ],
        bool,
    )


def _measure_all(
    rows: pa.Table, sections: Mapping[str, Section]
) -> dict[str, np.ndarray]:
    """Return the columns of rule sets, with one call for all that have the same
    function.
    """
    arguments: dict[Callable[..., Columns], list[Section]] = {}
    for name, section in sections.items():
        arguments.setdefault(rule_set(name).measure, []).append(section)
    columns: dict[str, np.ndarray] = {}
    for function, of_function in arguments.items():
        columns |= function(rows, *of_function)
    return columns
