"""The stage `filter`: heuristic rules drop documents, and every value that they
examined is recorded.

Rules that differ by language (`by_language`) judge the documents of each language
together, so that the kernels get as many texts at a time as without. A language's rule
has its own name, `de/gopher_quality/min_words`; general rules keep theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NotRequired

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import measure_texts
from gristmill.dataprep.conservation import (
    Counted,
    Counts,
    Histograms,
    RuleCounts,
    add_counts,
    add_histograms,
    balance,
    histogram,
)
from gristmill.dataprep.documents import Inputs, read_shard, spread
from gristmill.dataprep.filters.replayed_rules import prefix_of
from gristmill.dataprep.filters.rule_sets import (
    column_edges,
    columns_read,
    measure,
)
from gristmill.dataprep.langid.language_codes import Language, best_match, parse_label
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.thresholds import (
    Columns,
    count_failures,
    failures,
    first_failures,
)
from gristmill.dataprep.words.language_words import tokenizer_of
from gristmill.dataprep.words.spacy_words import load_tokenizer
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.filter import GENERAL_RULES, RULES_LANGUAGE, Filter
from gristmill.mixtures.steps.rules import Rules, columns_of, word_library

UNLISTED = "unlisted_language"
"""Reason of `unlisted: drop`, and the key of documents that pass unjudged in the counts
by language.
"""


@dataclass(frozen=True)
class FilterSummary:
    """Summary of the rules.

    Attributes:
        counts: documents by outcome.
        rules: rule -> documents that fail it (`failing`), and only it (`only`).
        histograms: of each statistic.
        histograms_by_source: source -> histogram of each statistic.
        by_language: with `by_language`, entry -> documents `read` and `kept`.
    """

    counts: Counts
    rules: RuleCounts
    histograms: Histograms
    histograms_by_source: Mapping[str, Histograms]
    by_language: Mapping[str, Mapping[str, int]] | None = None


class FilteredShard(Counted):
    """Result of judging a shard; see `FilterSummary`."""

    rules: RuleCounts
    histograms_by_source: dict[str, Histograms]
    by_language: NotRequired[dict[str, dict[str, int]]]


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> FilterSummary:
    """Judge every kept document by the configured rules.

    Writes one annotation table per document shard, with a column for each statistic of
    a configured rule set (see `rule_sets.py`), null for documents that were not judged.
    With `by_language` all of them are float64, and `rules_language` names the rules
    that judged a document.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `filter` section (`mixtures.steps.filter.Filter`).

    Raises:
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
        gristmill.dataprep.words.language_words.NoTokenizerError: `words: language`
            without a library that it needs.
    """
    section = Filter.model_validate(config)
    for language, rules in rules_by_entry(section).items():
        # Load the tokenizers before threads use them.
        text_language = None if language == GENERAL_RULES else language
        for rule_set in rules.sets.values():
            library = word_library(rule_set)
            if library == "spacy":
                load_tokenizer()
            elif library == "datatrove":
                rule_language = getattr(rule_set, "language", "auto")
                tokenizer_of(
                    text_language if rule_language == "auto" else rule_language
                )
    results = run_tasks(
        "filter",
        shard_tasks(inputs["ingest"]),
        partial(filter_shard, inputs=inputs, section=section, out=out),
        context,
    )
    parts = [result["histograms_by_source"] for result in results]
    by_source = {
        source: add_histograms(part.get(source, {}) for part in parts)
        for source in sorted(set().union(*parts))
    }
    return FilterSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        add_counts(result["rules"] for result in results),
        add_histograms(by_source.values()),
        by_source,
        add_counts(result["by_language"] for result in results)
        if section.by_language
        else None,
    )


def filter_shard(
    task: ShardTask, inputs: Inputs, section: Filter, out: Path
) -> Done[FilteredShard]:
    """Judge one document shard and write its annotations."""
    language_columns = ["language", "script"] if section.by_language else []
    column_names = dict.fromkeys(
        ["id", "source", "text", *columns_read(section.rule_sets), *language_columns]
    )
    shard = read_shard(inputs, task.name, list(column_names), section.sources)
    judged = judge(shard.judged_documents, section)
    columns = {
        name: spread(values, judged.errors)
        for name, values in judged.statistics.items()
    }
    if section.by_language:
        columns[RULES_LANGUAGE] = pa.array(judged.entries, pa.string())
    counts = shard.write(out / task.name, judged.reasons, columns, judged.errors)
    good = pa.array([error is None for error in judged.errors], pa.bool_())
    sources = shard.judged_documents["source"].filter(good).cast(pa.string()).to_numpy()
    edges = column_edges(section.rule_sets)
    histograms_by_source = {
        source: {
            name: histogram(values[sources == source], edges[name])
            for name, values in judged.statistics.items()
        }
        for source in np.unique(sources).tolist()
    }
    result = FilteredShard(
        counts=counts,
        rules=judged.rules,
        histograms_by_source=histograms_by_source,
    )
    if section.by_language:
        entries = [entry or UNLISTED for entry in judged.entries]
        outcomes = zip(entries, judged.reasons, judged.errors, strict=True)
        kept = Counter(
            entry
            for entry, reason, error in outcomes
            if reason is None and error is None
        )
        result["by_language"] = {
            entry: {"read": number, "kept": kept[entry]}
            for entry, number in Counter(entries).items()
        }
    return Done([out / task.name], result)


@dataclass
class Judged:
    """Result of the rules for n documents.

    Attributes:
        statistics: column -> values of the documents that could be measured, in order.
        errors: per document the reason why it could not be measured, or None.
        reasons: per document the rule that drops it, or None.
        rules: see `count_failures`.
        entries: with `by_language`, per document the entry whose rules judged it; None
            if it was not judged.
    """

    statistics: Columns
    errors: list[str | None]
    reasons: list[str | None]
    rules: RuleCounts
    entries: list[str | None]


def judge(rows: pa.Table, section: Filter) -> Judged:
    """Judge n documents, those of each language by its own rules.

    Args:
        rows: `text`, the columns of `columns_read`, `source` with `rule_sources`, and
            `language` and `script` with `by_language`.
    """
    if not section.by_language:
        return _judge_by(rows, section.rules, section)
    entries = entries_of(rows, section)
    columns = [column for name in section.rule_sets for column in columns_of(name)]
    statistics = {name: np.full(len(rows), np.nan) for name in columns}
    errors, reasons = np.full(len(rows), None, object), np.full(len(rows), None, object)
    tallies = []
    for entry, rules in rules_by_entry(section).items():
        places = np.flatnonzero(entries == entry)
        if len(places) == 0:
            continue
        judged = _judge_by(rows.take(places), rules, section, prefix_of(entry))
        errors[places], reasons[places] = judged.errors, judged.reasons
        good = places[[error is None for error in judged.errors]]
        for name, values in judged.statistics.items():
            statistics[name][good] = values
        tallies.append(judged.rules)
    if section.unlisted == "drop":
        reasons[entries == None] = UNLISTED  # noqa: E711 - elementwise
    measured = [error is None for error in errors]
    return Judged(
        {name: values[measured] for name, values in statistics.items()},
        errors.tolist(),
        reasons.tolist(),
        add_counts(tallies),
        entries.tolist(),
    )


def _judge_by(
    rows: pa.Table, rules: Rules, section: Filter, prefix: str = ""
) -> Judged:
    """Judge documents by the same rules, whose names get a prefix."""
    measure_rows = partial(measure, rules=rules, rule_sources=section.rule_sources)
    statistics, errors = measure_texts(rows, measure_rows)
    failed = {
        prefix + rule: mask for rule, mask in failures(statistics, rules.sets).items()
    }
    good = np.flatnonzero([error is None for error in errors])
    reasons: list[str | None] = [None] * len(rows)
    for row, reason in zip(good, first_failures(failed, len(good)), strict=True):
        reasons[row] = reason
    return Judged(statistics, errors, reasons, count_failures(failed), [])


def rules_by_entry(section: Filter) -> dict[str, Rules]:
    """Return the rules of each entry: of each language and, if they judge any document,
    the general ones.
    """
    entries = dict(section.by_language)
    if not section.by_language or section.unlisted == "general":
        entries[GENERAL_RULES] = section.rules
    return entries


def entries_of(rows: pa.Table, section: Filter) -> np.ndarray:
    """Return the entry whose rules judge each of n documents: objects of shape (n,),
    None if no rules do.
    """
    entry_of_label = {
        str(parse_label(language)): language for language in section.by_language
    }
    fallback = GENERAL_RULES if section.unlisted == "general" else None

    @cache
    def entry_of(code: str | None, script: str | None) -> str | None:
        if code is None:
            return fallback
        return best_match(Language(code, script or ""), entry_of_label) or fallback

    languages = map(entry_of, rows["language"].to_pylist(), rows["script"].to_pylist())
    return np.array(list(languages), object)
