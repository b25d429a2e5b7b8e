"""Measuring documents batch by batch, so that one bad document costs only itself.

For stages that look at all documents together: every job of such a stage reads the same texts in the same order. What
the stages before say of a shard is merged once, so that no job but the first reads all their tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import Counts
from gristmill.dataprep.documents import (
    MERGED,
    annotate,
    annotation_stages,
    combine_annotations,
    judged_rows,
    read_shard,
    read_table,
    write_table,
)
from gristmill.dataprep.edits import EDITS
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks, shard_tasks
from gristmill.dataprep.secrets import mask_text
from gristmill.dataprep.text.kernels import text_buffers

BATCH_ROWS = 1000

Measure = Callable[[Any], Mapping[str, Any]]
"""A function from n texts, or n rows of a table, to columns of n values: NumPy arrays, or Arrow's where NumPy has no
such type."""


def measure_texts(texts: pa.ChunkedArray | pa.Table, measure: Measure) -> tuple[dict[str, Any], list[str | None]]:
    """Measure every text; one that raises gets an error instead of values.

    Args:
        texts: n strings, or a table of n rows.
        measure: called with a batch and, where that raises, with each of its texts alone. It must be pure.

    Returns:
        columns of the texts that did not raise, in their order; and per text its error, or None.
    """
    parts: list[Mapping[str, Any]] = [measure(texts.slice(0, 0).combine_chunks())]
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
    return {name: _concatenate([part[name] for part in parts]) for name in parts[0]}, errors


def _concatenate(arrays: list[Any]) -> Any:
    return pa.concat_arrays(arrays) if isinstance(arrays[0], pa.Array) else np.concatenate(arrays)


def spread(values: np.ndarray | pa.Array, errors: Sequence[str | None]) -> pa.Array:
    """A measured column with a null for every text that raised, and for NaN, which stands for "does not apply"."""
    good = np.array([error is None for error in errors], bool)
    positions = np.cumsum(good) - 1
    column = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
    return column.take(pa.array(positions, mask=~good))


def _try(measure: Measure, texts: pa.Array | pa.Table) -> tuple[Mapping[str, Any] | None, str | None]:
    try:
        return measure(texts), None
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes to the quarantine
        return None, mask_text(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class JudgedTexts:
    """What a stage judges of one shard.

    Attributes:
        documents: the shard with `id`, `source`, `locator` and `text`.
        rows: int64, rows that earlier stages kept.
        judged: int64, those of them that this stage judges.
        errors: per judged row, why its text cannot be read, or None.
        good: int64, the judged rows whose text can be read, ascending.
        texts: their texts, one `large_string` array.
    """

    documents: pa.Table
    rows: np.ndarray
    judged: np.ndarray
    errors: Sequence[str | None]
    good: np.ndarray
    texts: pa.Array

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the readable texts as two uint64 each, which sort as the bytes do."""
        ids = self.documents["id"].take(pa.array(self.good)).combine_chunks()
        halves = np.frombuffer(b"".join(ids.to_pylist()), ">u8").astype(np.uint64).reshape(-1, 2)
        return halves[:, 0].copy(), halves[:, 1].copy()

    def annotate(self, reasons: Sequence[str | None], measures: Mapping[str, pa.Array]) -> tuple[pa.Table, Counts]:
        """The annotation table and its counts; `reasons` and `measures` have one value per readable text."""
        columns = {name: spread(values, self.errors) for name, values in measures.items()}
        spread_reasons = spread(pa.array(reasons, pa.string()), self.errors)
        return annotate(self.documents, self.rows, self.judged, spread_reasons, columns, self.errors)


def read_judged(inputs: Mapping[str, Path], shard: str, sources: Sequence[str] | None) -> JudgedTexts:
    """Read the texts of a shard that were kept so far and belong to the sources (all where None)."""
    read = read_shard(inputs, shard, ["id", "source", "locator", "text"])
    documents, rows = read.documents, read.rows
    judged = judged_rows(documents, rows, sources)
    column = documents["text"].take(pa.array(judged))
    _, errors = measure_texts(column, _check_encoding)
    readable = np.array([error is None for error in errors], bool)
    texts = column.filter(pa.array(readable)).combine_chunks().cast(pa.large_string())
    return JudgedTexts(documents, rows, judged, errors, judged[readable], texts)


def merge_annotations(inputs: Mapping[str, Path], context: Context) -> dict[str, Path]:
    """The inputs of a stage with one annotating stage, MERGED, in place of all of them.

    For a stage that reads every shard several times: its tables, which lie in the work folder, say which rows all
    stages kept, and what their edits do at once. Of a shard every job then reads two files, however long the chain is.

    Args:
        inputs: `ingest`, and the annotating stages in the order in which they ran.
        context: where to run.

    Returns:
        the inputs as they are where there is nothing to merge.
    """
    stages = annotation_stages(inputs)
    if len(stages) < 2:
        return dict(inputs)
    out = context.work / MERGED
    merge = partial(merge_shard, inputs=dict(inputs), out=out)
    run_tasks("merge", shard_tasks(inputs["ingest"]), merge, context, direct=True)
    return {**{name: folder for name, folder in inputs.items() if name not in stages}, MERGED: out}


def merge_shard(task: Task, inputs: Mapping[str, Path], out: Path) -> Done:
    """Write the annotations of all stages of one shard as one table: `id`, `keep` and, where a stage edits, `edits`."""
    ids = read_table(inputs["ingest"] / task.name, ["id"])["id"]
    combined = combine_annotations(inputs, task.name, ids, [EDITS])
    edits = {} if combined.edits is None else {EDITS: combined.edits}
    write_table(out / task.name, pa.table({"id": ids, "keep": pa.array(combined.keep), **edits}), repeating=())
    return Done([out / task.name])


def _check_encoding(texts: pa.Array) -> dict[str, np.ndarray]:
    """Raise where a text is not UTF-8, which all kernels rely on."""
    text_buffers(texts)
    return {}
