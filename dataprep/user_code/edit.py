"""Stage `edit`: change texts with a user's function, and derive the edits by
comparison.

The function maps one document to its new text, or a batch to an array of new texts.
Differences are stored as edits, like those of `clean`, so that documents stay unchanged
and `explain` shows the changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts, add_counts, balance
from gristmill.dataprep.documents import Inputs, Remarks
from gristmill.dataprep.edits import (
    EDITS,
    Applications,
    Edit,
    derive_edits,
    edits_array,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.user_code.own_documents import (
    BATCH_ROWS,
    DocumentFunction,
    JudgedColumns,
    OwnShard,
    call_on,
    described,
    known_columns,
    load_document_function,
    read_judged_columns,
    warn_of_difference,
)
from gristmill.dataprep.user_code.time_limits import TimeLimit
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.own_steps import Edit as EditStep

EMPTY = "edit/empty"
REMOVED, ADDED = "bytes_removed", "bytes_added"
MOST_GROWTH_CHARACTERS = 10_000_000
"""Maximum growth of a text by a function."""


@dataclass(frozen=True)
class EditSummary:
    """Summary of a user's edits.

    Attributes:
        counts: documents by outcome.
        edits: name of the function -> its applications.
        code: description of the code.
        differs: different results of two calls, if any.
    """

    counts: Counts
    edits: Mapping[str, Applications]
    code: str
    differs: str | None = None


class EditedShard(OwnShard):
    """Result of editing a shard."""

    edits: Applications


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> EditSummary:
    """Edit every kept document with the user's function.

    Writes one annotation table per document shard, with `edits`, and the numbers of
    removed and added bytes. A document that becomes empty or white space is dropped:
    `edit/empty`.

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        config: the manifest's `edit` section (`mixtures.steps.own_steps.Edit`), with
            the code by value.

    Raises:
        OwnCodeError: the function cannot be called, or did not return text.
        ConservationError, QuarantineError: see `counts`.
    """
    section = EditStep.model_validate(config)
    columns = known_columns(inputs)
    load_document_function(section, columns)  # fail before any work
    results = run_tasks(
        "edit",
        shard_tasks(inputs["ingest"]),
        partial(edit_shard, inputs=inputs, section=section, out=out, known=columns),
        context,
        holds_gil=True,
    )
    return EditSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        {section.use.name: add_counts(result["edits"] for result in results)},
        section.use.describe(),
        warn_of_difference(section, results, context),
    )


def edit_shard(
    task: ShardTask,
    inputs: Inputs,
    section: EditStep,
    out: Path,
    known: Sequence[str],
) -> Done[EditedShard]:
    """Edit one document shard and write its annotations."""
    function = load_document_function(section, known)
    judged_columns = read_judged_columns(
        inputs, task.name, section.sources, function.reads
    )
    with TimeLimit(section.time_limit_seconds) as limit:
        new_texts, errors = edit_texts(function, judged_columns.given, limit)
        differs = compare_calls(function, judged_columns, new_texts, errors, limit)
    edits, errors = compare_texts(
        judged_columns.judged_documents["text"],
        new_texts,
        errors,
    )
    reasons = [
        EMPTY if text is not None and not text.strip() else None for text in new_texts
    ]
    removed = [
        sum(end - begin for begin, end, _ in document_edits) for document_edits in edits
    ]
    added = [
        sum(len(text.encode()) for *_, text in document_edits)
        for document_edits in edits
    ]
    failed = np.array([error is not None for error in errors], bool)
    columns = {
        EDITS: edits_array(edits),
        REMOVED: pa.array(removed, pa.int64(), mask=failed),
        ADDED: pa.array(added, pa.int64(), mask=failed),
    }
    counts = judged_columns.write(out / task.name, reasons, columns, errors)
    return Done(
        [out / task.name],
        {
            "counts": counts,
            "differs": differs,
            "edits": {
                "documents": sum(map(bool, edits)),
                "times": sum(map(len, edits)),
                "bytes": sum(removed),
            },
        },
    )


def edit_texts(
    function: DocumentFunction, given: pa.Table, limit: TimeLimit
) -> tuple[list[str | None], list[str | None]]:
    """New texts of n documents, None for those that raised; and their errors, None for
    the others.

    Raises:
        OwnCodeError: the function did not return text.
    """
    new_texts: list[str | None] = []
    errors: list[str | None] = []
    for start in range(0, len(given), BATCH_ROWS):
        for returned in call_on(function, given.slice(start, BATCH_ROWS), limit):
            errors += [returned.error] * returned.rows
            new_texts += (
                [None]
                if returned.error is not None
                else _texts(function, returned.value, returned.rows)
            )
    return new_texts, errors


def _texts(function: DocumentFunction, value: Any, rows: int) -> list[str]:
    """Texts returned by one call."""
    if function.batch is None:
        if not isinstance(value, str):
            raise function.wrong(f"returned {described(value)}; return the new text")
        return [value]
    if isinstance(value, pa.Array | pa.ChunkedArray):
        value = value.to_pylist()
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        raise function.wrong(
            f"returned {described(value)}; return an array of the new texts"
        )
    new_texts = list(value)
    if len(new_texts) != rows:
        raise function.wrong(
            f"returned {len(new_texts):,} texts for {rows:,} "
            "documents; return one for each"
        )
    invalid = next((text for text in new_texts if not isinstance(text, str)), "")
    if invalid != "":
        raise function.wrong(
            f"returned {described(invalid)} among the new texts; "
            "return a text for each document"
        )
    return [str(text) for text in new_texts]


def compare_calls(
    function: DocumentFunction,
    read: JudgedColumns,
    made: Remarks,
    errors: Remarks,
    limit: TimeLimit,
) -> str | None:
    """Call a function again on the first documents that did not raise; returns the
    difference in words, or None.
    """
    good, sample = read.sample(errors)
    again, new_errors = edit_texts(function, sample, limit)
    if (difference := read.raised_again(good, new_errors)) is not None:
        return difference
    for row, text in zip(good, again, strict=True):
        if text != made[row]:
            return f"two calls with document {read.shown(row)} gave different texts"
    return None


def compare_texts(
    texts: pa.ChunkedArray, made: Remarks, errors: Remarks
) -> tuple[list[list[Edit]], list[str | None]]:
    """Edits from the old texts to the new ones; and the errors, including those of the
    comparison.
    """
    edits: list[list[Edit]] = []
    all_errors = list(errors)
    for row, after in enumerate(made):
        edits.append([])
        if after is None:
            continue
        try:
            before = texts[row].as_py()
            growth = len(after) - len(before)
            if growth <= MOST_GROWTH_CHARACTERS:
                edits[-1] = list(derive_edits(before, after))
            else:
                all_errors[row] = (
                    f"the new text is {growth:,} characters longer; at most "
                    f"{MOST_GROWTH_CHARACTERS:,} are allowed"
                )
        except UnicodeError as error:
            # half of a surrogate pair, or a document that is not UTF-8
            all_errors[row] = f"{type(error).__name__}: {error}"
    return edits, all_errors
