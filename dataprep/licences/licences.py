"""Stage `licences`: the licence of each document as an SPDX expression, and an
allow-list of licences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import measure_texts
from gristmill.dataprep.conservation import Counted, Counts, add_counts, balance
from gristmill.dataprep.documents import Inputs, read_shard
from gristmill.dataprep.licences.statements import Statement, of_metadata, of_text
from gristmill.dataprep.runners.tasks import Done, ShardTask, run_tasks, shard_tasks
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.spdx import UNKNOWN, is_allowed
from gristmill.mixtures.steps.licences import Licences

SPDX, SPDX_BY = "spdx", "spdx_by"
NOT_ALLOWED, UNKNOWN_LICENCE = "licence", "unknown_licence"
"""Reasons for dropping a document."""


class LicensedShard(Counted):
    """Result of judging a shard; see `LicenceSummary`."""

    licences: dict[str, int]
    licences_kept: dict[str, int]


@dataclass(frozen=True)
class LicenceSummary:
    """Summary of the licences.

    Attributes:
        counts: documents by outcome.
        licences: SPDX expression, or `unknown` -> documents.
        licences_kept: of these, the kept ones.
    """

    counts: Counts
    licences: Mapping[str, int]
    licences_kept: Mapping[str, int]


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> LicenceSummary:
    """Measure `spdx` and `spdx_by` of every kept document, and drop those whose licence
    is not allowed.

    Reasons: `licence` (known and not allowed), `unknown_licence`.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's section (`mixtures.steps.licences.Licences`).

    Raises:
        ConservationError, QuarantineError: see `counts`.
    """
    section = Licences.model_validate(config)
    results = run_tasks(
        "licences",
        shard_tasks(inputs["ingest"]),
        partial(judge_shard, inputs=inputs, section=section, out=out),
        context,
    )
    return LicenceSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        add_counts(result["licences"] for result in results),
        add_counts(result["licences_kept"] for result in results),
    )


def judge_shard(
    task: ShardTask, inputs: Inputs, section: Licences, out: Path
) -> Done[LicensedShard]:
    """Judge the licences of one document shard and write its annotations."""
    columns = ["id", "source", "text", "metadata"]
    shard = read_shard(inputs, task.name, columns, section.sources)
    measured, errors = measure_texts(
        shard.judged_documents.select(columns[1:]),
        partial(measure, section.stated or {}),
    )
    expressions = measured[SPDX].tolist()
    verdicts = [verdict(section, expression) for expression in expressions]
    counts = shard.write_measured(out / task.name, verdicts, measured, errors)
    kept = [
        expression
        for expression, reason in zip(expressions, verdicts, strict=True)
        if reason is None
    ]
    result: LicensedShard = {
        "counts": counts,
        "licences": dict(sorted(Counter(expressions).items())),
        "licences_kept": dict(sorted(Counter(kept).items())),
    }
    return Done([out / task.name], result)


def measure(
    stated: Mapping[str, str], documents: pa.RecordBatch | pa.Table
) -> dict[str, np.ndarray]:
    """Measures of n documents: `spdx`, and `spdx_by`, which is empty if nothing states
    a licence.
    """
    statements = [
        statement_of(*row, stated)
        for row in zip(
            *(documents[name].to_pylist() for name in ("source", "text", "metadata")),
            strict=True,
        )
    ]
    expressions = [(each and each.spdx) or UNKNOWN for each in statements]
    return {
        SPDX: np.array(expressions, np.object_),
        SPDX_BY: np.array([each.by if each else "" for each in statements], np.object_),
    }


def statement_of(
    source: str, text: str, metadata: str | None, stated: Mapping[str, str]
) -> Statement | None:
    """First statement with an identifier about a document, else the first one."""
    statements = [of_text(text), of_metadata(metadata)]
    if source in stated:
        statements.append(Statement(stated[source], "source"))
    named = [statement for statement in statements if statement is not None]
    known = (statement for statement in named if statement.spdx is not None)
    return next(known, named[0] if named else None)


def verdict(section: Licences, expression: str) -> str | None:
    """Reason for dropping a document under an SPDX expression, or None."""
    if section.allow is None:
        return None
    if expression == UNKNOWN:
        return UNKNOWN_LICENCE if section.unknown == "drop" else None
    return None if is_allowed(expression, section.allow) else NOT_ALLOWED
