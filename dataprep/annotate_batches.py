"""Measuring documents in batches; a document that raises an error is quarantined alone.

For stages that compare documents with each other: each of their jobs reads the same
texts in the same order. The annotations of earlier stages are merged once per shard, so
that only the first job reads all their tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import binary_numbers
from gristmill.core.secrets import mask_text
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import (
    MERGED,
    Inputs,
    Remarks,
    Shard,
    annotation_stages,
    combine_annotations,
    read_shard,
    read_table,
    write_table,
)
from gristmill.dataprep.edits import EDITS
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks, shard_tasks
from gristmill.dataprep.text.kernels import text_buffers

BATCH_ROWS = 1000

Columns = dict[str, Any]
"""Columns of n values: NumPy arrays, or Arrow arrays for types that NumPy lacks."""
Measure = Callable[[Any], Mapping[str, Any]]
"""Function from n texts, or n rows of a table, to columns of n values."""


def measure_texts(
    texts: pa.ChunkedArray | pa.Table, measure: Measure
) -> tuple[Columns, list[str | None]]:
    """Measure every text; a text that raises gets an error instead of values.

    Args:
        texts: n strings, or a table of n rows.
        measure: pure function, called with a batch and, if that raises, with each of
            its texts alone.

    Returns:
        columns of the texts that did not raise, in order; and per text its error, or
        None.
    """
    parts = [measure(texts.slice(0, 0).combine_chunks())]
    errors: list[str | None] = []
    for start in range(0, len(texts), BATCH_ROWS):
        batch = texts.slice(start, BATCH_ROWS).combine_chunks()
        measured, error = _try(measure, batch)
        if measured is not None:
            parts.append(measured)
            errors.extend([None] * len(batch))
            continue
        for row in range(len(batch)):
            measured, error = _try(measure, batch.slice(row, 1))
            errors.append(error)
            if measured is not None:
                parts.append(measured)
    columns: Columns = {}
    for name, first in parts[0].items():
        concatenate = (
            pa.concat_arrays if isinstance(first, pa.Array) else np.concatenate
        )
        columns[name] = concatenate([part[name] for part in parts])
    return columns, errors


def _try(
    measure: Measure, texts: pa.Array | pa.Table
) -> tuple[Mapping[str, Any] | None, str | None]:
    try:
        return measure(texts), None
    except Exception as error:  # noqa: BLE001 - any error quarantines the document
        return None, mask_text(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class JudgedTexts(Shard):
    """A shard with `id`, `source`, `locator` and `text`, and the texts that a stage
    judges.

    Attributes:
        errors: per judged row, the error of reading its text, or None.
        good: int64, ascending, judged rows with readable text.
        texts: their texts, one `large_string` array.
    """

    errors: Remarks
    good: np.ndarray
    texts: pa.Array

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the readable texts as two uint64 each, which sort like the bytes."""
        words = binary_numbers(self.documents["id"].take(self.good), ">u8")
        high, low = words.T.astype(np.uint64, order="C")
        return high, low

    def passage(self, text: int, begin: int, end: int) -> str:
        """Bytes `begin` up to `end` of a readable text."""
        passage: bytes = self.texts[text].as_py().encode()[begin:end]
        return passage.decode()


def read_judged(
    inputs: Inputs, shard: str, sources: Sequence[str] | None
) -> JudgedTexts:
    """Read the texts of a shard that were kept so far and belong to the sources (all if
    None).
    """
    read = read_shard(inputs, shard, ["id", "source", "locator", "text"], sources)
    column = read.judged_documents["text"]

    def check_encoding(texts: pa.Array) -> dict[str, np.ndarray]:
        text_buffers(texts)  # all kernels rely on UTF-8
        return {}

    _, errors = measure_texts(column, check_encoding)
    readable = np.array([error is None for error in errors], bool)
    texts = column.filter(readable).combine_chunks().cast(pa.large_string())
    good = read.judged[readable]
    return JudgedTexts(read.documents, read.rows, read.judged, errors, good, texts)


def merge_annotations(inputs: Inputs, context: Context) -> dict[str, Path]:
    """Replace all annotating stages among the inputs by one, MERGED.

    For stages that read every shard several times. The merged tables, in the work
    folder, have the rows kept by all stages and their composed edits, so that each job
    reads two files per shard, however long the chain is.

    Args:
        inputs: `ingest`, and the annotating stages in the order in which they ran.
        context: of the stage.

    Returns:
        the new inputs, or the same ones if fewer than two stages annotate.
    """
    stages = annotation_stages(inputs)
    if len(stages) < 2:
        return dict(inputs)
    out = context.work / MERGED
    run_tasks(
        "merge",
        shard_tasks(inputs["ingest"]),
        partial(merge_shard, inputs=inputs, out=out),
        context,
    )
    return {
        **{name: folder for name, folder in inputs.items() if name not in stages},
        MERGED: out,
    }


def merge_shard(task: Task, inputs: Inputs, out: Path) -> Done:
    """Write the annotations of all stages of one shard as one table: `id`, `keep` and,
    if a stage edits, `edits`.
    """
    ids = read_table(inputs["ingest"] / task.name, ["id"])["id"]
    combined = combine_annotations(inputs, task.name, ids, [EDITS])
    edits = {} if combined.edits is None else {EDITS: combined.edits}
    write_table(
        out / task.name,
        pa.table({"id": ids, "keep": combined.keep, **edits}),
        repeating=(),
    )
    return Done([out / task.name])
