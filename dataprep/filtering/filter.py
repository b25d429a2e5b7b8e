"""The stage `filter`: heuristic rules drop documents, and every value that they looked at is written down.

Rules that differ by language (`by_language`) judge the documents of each language together, so that the kernels have
as many texts at a time as without. A rule of a language has a name of its own, `de/gopher_quality/min_words`; what the
general rules drop has theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep import conservation as histograms
from gristmill.dataprep.annotate_batches import measure_texts, spread
from gristmill.dataprep.conservation import add_counts, balance
from gristmill.dataprep.documents import (
    annotate,
    judged_rows,
    read_shard,
    write_table,
)
from gristmill.dataprep.filtering.rule_columns import RULE_COLUMNS, edges
from gristmill.dataprep.filtering.rule_sets import columns_read, configured_sets, measure
from gristmill.dataprep.jobs.tasks import Done, Task, run_tasks, shard_tasks
from gristmill.dataprep.langid.language_codes import Language, best_match, parse_label
from gristmill.dataprep.thresholds import count_failures, failures, first_failures
from gristmill.dataprep.whatif_thresholds import Columns, Rule, remember_last, threshold_rules
from gristmill.dataprep.words.language_words import load_words
from gristmill.mixtures.steps.filter import GENERAL_RULES, RULES_LANGUAGE, Filter
from gristmill.mixtures.steps.rules import Rules

UNLISTED = "unlisted_language"
"""The reason of `unlisted: drop`, and what the counts by language call documents that pass unjudged."""


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Judge every kept document by the configured rules.

    Writes one annotation table per document shard, with a column for each statistic of a configured rule set (see
    `rule_sets.py`), null where a document was not judged. With `by_language` all of them are float64, and
    `rules_language` says whose rules judged a document.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `filter` section (`mixtures.steps.filter.Filter`).

    Returns:
        `counts`; `rules`: per rule how many documents fail it, and fail only it; `histograms`: per statistic;
        `histograms_by_source`: per source and statistic; with `by_language` also `by_language`: whose rules ->
        documents that they `read` and `kept`.

    Raises:
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
        gristmill.dataprep.words.language_words.NoTokenizerError: `words: language` without a library that it needs.
    """
    section = Filter.model_validate(config)
    for language, rules in rules_by_entry(section).items():
        load_words(rules, None if language == GENERAL_RULES else language)
    tasks = shard_tasks(inputs["ingest"])
    process = partial(filter_shard, inputs=dict(inputs), config=section.model_dump(mode="json"), out=out)
    results = run_tasks("filter", tasks, process, context)
    counts = balance(results, section.max_quarantined, context.stage, errors=out)
    by_source = histograms.add_by_source(result["histograms_by_source"] for result in results)
    summary = {
        "counts": counts,
        "rules": add_counts(result["rules"] for result in results),
        "histograms": histograms.add_histograms(by_source.values()),
        "histograms_by_source": by_source,
    }
    if section.by_language:
        summary["by_language"] = add_counts(result["by_language"] for result in results)
    return summary


def filter_shard(task: Task, inputs: Mapping[str, Path], config: dict[str, Any], out: Path) -> Done:
    """Judge one document shard and write its annotations."""
    section = Filter.model_validate(config)
    of_language = ["language", "script"] if section.by_language else []
    wanted = dict.fromkeys(["id", "source", "text", *columns_read(section.rule_sets), *of_language])
    read = read_shard(inputs, task.name, list(wanted))
    documents, rows = read.documents, read.rows
    judged = judged_rows(documents, rows, section.sources)
    found = judge(documents.take(judged), section)
    columns = {name: spread(values, found.errors) for name, values in found.statistics.items()}
    if section.by_language:
        columns[RULES_LANGUAGE] = pa.array(found.entries, pa.string())
    table, counts = annotate(documents, rows, judged, found.reasons, columns, found.errors)
    write_table(out / task.name, table)
    good = judged[[error is None for error in found.errors]]
    sources = documents["source"].take(pa.array(good)).cast(pa.string()).to_numpy()
    shapes = {
        source: {
            name: histograms.histogram(values[sources == source], edges(name))
            for name, values in found.statistics.items()
        }
        for source in np.unique(sources).tolist()
    }
    result = {"counts": counts, "rules": found.rules, "histograms_by_source": shapes}
    if section.by_language:
        result["by_language"] = _count_by_entry(found)
    return Done([out / task.name], result)


@dataclass
class Judged:
    """What the rules say of n documents.

    Attributes:
        statistics: column -> values of the documents that could be measured, in their order.
        errors: per document why it could not be measured, or None.
        reasons: per document the rule that drops it, or None.
        rules: see `count_failures`.
        entries: with `by_language`, per document whose rules judged it; None where it was not judged.
    """

    statistics: dict[str, np.ndarray]
    errors: list[str | None]
    reasons: list[str | None]
    rules: dict[str, dict[str, int]]
    entries: list[str | None]


def judge(rows: pa.Table, section: Filter) -> Judged:
    """Judge n documents, those of each language by its own rules.

    Args:
        rows: `text`, the columns that `columns_read` says, `source` with `rule_sources`, and `language` and `script`
            with `by_language`.
    """
    if not section.by_language:
        return _judge_by(rows, section.rules, section)
    entries = entries_of(rows, section)
    statistics = {name: np.full(len(rows), np.nan) for name in _columns(section)}
    errors, reasons = np.full(len(rows), None, object), np.full(len(rows), None, object)
    tallies = []
    for entry, rules in rules_by_entry(section).items():
        places = np.flatnonzero(entries == entry)
        if len(places) == 0:
            continue
        found = _judge_by(rows.take(pa.array(places)), rules, section, prefix_of(entry))
        errors[places], reasons[places] = found.errors, found.reasons
        good = places[[error is None for error in found.errors]]
        for name, values in found.statistics.items():
            statistics[name][good] = values
        tallies.append(found.rules)
    if section.unlisted == "drop":
        reasons[entries == None] = UNLISTED  # noqa: E711 - of each
    measured = [error is None for error in errors]
    return Judged(
        {name: values[measured] for name, values in statistics.items()},
        errors.tolist(),
        reasons.tolist(),
        add_counts(tallies),
        entries.tolist(),
    )


def _judge_by(rows: pa.Table, rules: Rules, section: Filter, prefix: str = "") -> Judged:
    """Judge documents by the same rules, whose names get a prefix."""
    measure_rows = partial(measure, rules=rules, rule_sources=section.rule_sources)
    statistics, errors = measure_texts(rows, measure_rows)
    failed = {prefix + rule: mask for rule, mask in failures(statistics, configured_sets(rules)).items()}
    good = np.flatnonzero([error is None for error in errors])
    reasons: list[str | None] = [None] * len(rows)
    for row, reason in zip(good, first_failures(failed, len(good)), strict=True):
        reasons[row] = reason
    return Judged(statistics, errors, reasons, count_failures(failed), [])


def rules_by_entry(section: Filter) -> dict[str, Rules]:
    """Whose rules -> the rules: of each language and, where they judge any document, the general ones."""
    is_general = not section.by_language or section.unlisted == "general"
    return {**section.by_language, **({GENERAL_RULES: section.rules} if is_general else {})}


def prefix_of(entry: str) -> str:
    """What stands before the names of a language's rules; nothing before those of the general ones."""
    return "" if entry == GENERAL_RULES else f"{entry}/"


def entries_of(rows: pa.Table, section: Filter) -> np.ndarray:
    """Whose rules judge each of n documents: objects of shape (n,), None where none do."""
    named = {str(parse_label(language)): language for language in section.by_language}
    others = GENERAL_RULES if section.unlisted == "general" else None
    found: dict[tuple[str | None, str | None], str | None] = {}
    entries = np.full(len(rows), None, object)
    for row, of_row in enumerate(zip(rows["language"].to_pylist(), rows["script"].to_pylist(), strict=True)):
        if of_row not in found:
            code, script = of_row
            match = None if code is None else best_match(Language(code, script or ""), named)
            found[of_row] = others if match is None else match
        entries[row] = found[of_row]
    return entries


def _columns(section: Filter) -> list[str]:
    return [column for name in section.rule_sets for column in RULE_COLUMNS[name]]


def _count_by_entry(found: Judged) -> dict[str, dict[str, int]]:
    """Whose rules -> how many documents they read and kept."""
    counted: dict[str, dict[str, int]] = {}
    for entry, reason, error in zip(found.entries, found.reasons, found.errors, strict=True):
        of_entry = counted.setdefault(entry or UNLISTED, {"read": 0, "kept": 0})
        of_entry["read"] += 1
        of_entry["kept"] += reason is None and error is None
    return counted


def rules(stage: str, section: Filter, measured_columns: Collection[str]) -> Iterator[Rule]:
    """The thresholds of the rule sets that are chosen, for replaying."""
    every = {**section.by_language, GENERAL_RULES: section.rules}
    numbers = {entry: number for number, entry in enumerate(every)}

    @remember_last
    def judged_by(columns: Columns) -> np.ndarray:
        """Whose rules judged each document, by number; -1 where none did."""
        return np.array([numbers.get(entry, -1) for entry in columns[RULES_LANGUAGE]], np.int64)

    for entry, of_entry in every.items():
        at = f"{stage}.rules" if entry == GENERAL_RULES else f"{stage}.by_language.{entry}"
        for name, thresholds in configured_sets(of_entry).items():
            for rule in threshold_rules(thresholds, f"{at}.{name}", prefix_of(entry) + name):
                own = partial(_fails_of_its_own, judged_by, numbers[entry], rule.fails)
                yield replace(rule, fails=own, reads=(*rule.reads, RULES_LANGUAGE)) if section.by_language else rule


def _fails_of_its_own(
    judged_by: Callable[[Columns], np.ndarray], number: int, fails: Callable[[Columns], np.ndarray], columns: Columns
) -> np.ndarray:
    """Which documents fail a rule, of those that these rules have judged."""
    failed: np.ndarray = fails(columns) & (judged_by(columns) == number)
    return failed
