"""The stage `filter`: heuristic rules drop documents, and every value that they looked at is written down."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep import counts as histograms
from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, balance
from gristmill.dataprep.documents import (
    annotate,
    judged_rows,
    read_shard,
    write_table,
)
from gristmill.dataprep.filtering.rule_sets import columns_read, configured_sets, edges, measure
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks, shard_tasks
from gristmill.dataprep.measuring import measure_texts, spread
from gristmill.dataprep.replay import Rule, threshold_rules
from gristmill.dataprep.thresholds import count_failures, failures, first_failures
from gristmill.mixtures.steps.filter import Filter


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Judge every kept document by the configured rules.

    Writes one annotation table per document shard, with a column for each statistic of a configured rule set (see
    `rule_sets.py`), null where a document was not judged.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `filter` section (`mixtures.rules.Filter`).

    Returns:
        `counts`; `rules`: per rule how many documents fail it, and fail only it; `histograms`: per statistic;
        `histograms_by_source`: per source and statistic.

    Raises:
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
    """
    section = Filter.model_validate(config)
    tasks = shard_tasks(inputs["ingest"])
    process = partial(filter_shard, inputs=dict(inputs), config=section.model_dump(mode="json"), out=out)
    results = run_tasks("filter", tasks, process, context)
    counts = balance(results, section.max_quarantined, context.stage, errors=out)
    by_source = histograms.add_by_source(result["histograms_by_source"] for result in results)
    return {
        "counts": counts,
        "rules": add_counts(result["rules"] for result in results),
        "histograms": histograms.add_histograms(by_source.values()),
        "histograms_by_source": by_source,
    }


def filter_shard(task: Task, inputs: Mapping[str, Path], config: dict[str, Any], out: Path) -> Done:
    """Judge one document shard and write its annotations."""
    section = Filter.model_validate(config)
    wanted = dict.fromkeys(["id", "source", "text", *columns_read(section.rules)])
    read = read_shard(inputs, task.name, list(wanted))
    documents, rows = read.documents, read.rows
    judged = judged_rows(documents, rows, section.sources)
    measure_rows = partial(measure, rules=section.rules, rule_sources=section.rule_sources)
    statistics, errors = measure_texts(documents.take(judged), measure_rows)
    failed = failures(statistics, configured_sets(section.rules))
    good = np.flatnonzero([error is None for error in errors])
    reasons: list[str | None] = [None] * len(judged)
    for row, reason in zip(good, first_failures(failed, len(good)), strict=True):
        reasons[row] = reason
    columns = {name: spread(values, errors) for name, values in statistics.items()}
    table, counts = annotate(documents, rows, judged, reasons, columns, errors)
    write_table(out / task.name, table)
    sources = documents["source"].take(pa.array(judged[good])).cast(pa.string()).to_numpy()
    shapes = {
        source: {name: histograms.histogram(values[sources == source], edges(name))
                 for name, values in statistics.items()}
        for source in np.unique(sources).tolist()
    }  # fmt: skip
    result = {"counts": counts, "rules": count_failures(failed), "histograms_by_source": shapes}
    return Done([out / task.name], result)


def rules(stage: str, section: Filter, measured_columns: Collection[str]) -> Iterator[Rule]:
    """The thresholds of the rule sets that are chosen, for replaying."""
    for name, thresholds in configured_sets(section.rules).items():
        yield from threshold_rules(thresholds, f"{stage}.rules.{name}", name)
