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
import pyarrow.compute as pc

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import measure_texts
from gristmill.dataprep.conservation import Counted, Counts, add_counts, balance
from gristmill.dataprep.documents import Inputs, read_shard
from gristmill.dataprep.licences.statements import (
    HEADER_CHARACTERS,
    Statement,
    of_header,
    of_metadata,
)
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
    licences = add_counts(result["licences"] for result in results)
    return LicenceSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        licences,
        {name: licences[name] for name in licences if verdict(section, name) is None},
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
    licences = dict(sorted(Counter[str](measured[SPDX]).items()))
    reasons = {expression: verdict(section, expression) for expression in licences}
    verdicts = [reasons[expression] for expression in measured[SPDX]]
    counts = shard.write_measured(out / task.name, verdicts, measured, errors)
    return Done([out / task.name], {"counts": counts, "licences": licences})


def measure(
    stated: Mapping[str, str], documents: pa.RecordBatch | pa.Table
) -> dict[str, np.ndarray]:
    """Measures of n documents: `spdx`, by the first statement with an identifier, and
    `spdx_by`, which is empty if nothing states a licence.
    """
    heads = pc.utf8_slice_codeunits(documents["text"], 0, HEADER_CHARACTERS)
    of_source = {name: Statement(licence, "source") for name, licence in stated.items()}
    columns = documents["source"], heads, documents["metadata"]
    chosen = []
    for source, head, metadata in zip(
        *(column.to_pylist() for column in columns), strict=True
    ):
        places = (of_header(head), of_metadata(metadata), of_source.get(source))
        statements = [place for place in places if place] or [Statement("", "")]
        # the first with an identifier, else the first
        chosen.append(min(statements, key=lambda each: each.spdx == UNKNOWN))
    return {
        SPDX: np.array([statement.spdx for statement in chosen], np.object_),
        SPDX_BY: np.array([statement.by for statement in chosen], np.object_),
    }


def verdict(section: Licences, expression: str) -> str | None:
    """Reason for dropping a document under an SPDX expression, or None."""
    if section.allow is None or is_allowed(expression, section.allow):
        return None
    return UNKNOWN_LICENCE if expression == UNKNOWN else NOT_ALLOWED
