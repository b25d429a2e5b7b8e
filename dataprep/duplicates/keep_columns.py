"""The columns by which `dedup.keep` may choose a survivor: of the documents, and measured by earlier stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.dataprep.documents import annotation_stages, read_annotations, read_documents
from gristmill.dataprep.duplicates.clusters import KeepKey

DOCUMENT_COLUMNS = ("id", "source", "locator")
LENGTH = "length"
"""Code points of the text."""
JUDGEMENTS = ("id", "keep", "reason", "error")


def measured_columns(inputs: Mapping[str, Path]) -> dict[str, str]:
    """Columns that the stages before have measured -> the stage; of two equal names, the later stage's counts."""
    columns: dict[str, str] = {}
    for stage in annotation_stages(inputs):
        for path in sorted(inputs[stage].glob("part-*.parquet"))[:1]:
            with path.open("rb") as stream:
                names = pq.read_schema(stream).names
            columns.update((name, stage) for name in names if name not in JUDGEMENTS)
    return columns


def check_columns(inputs: Mapping[str, Path], keys: Sequence[KeepKey]) -> None:
    """Raise ValueError where a key names no column, unless there are no documents to choose from."""
    if not any(inputs["ingest"].glob("part-*.parquet")):
        return
    check_names(keys, measured_columns(inputs))


def check_names(keys: Sequence[KeepKey], measured: Iterable[str]) -> None:
    """Raise ValueError where a key names no column.

    Args:
        measured: the columns of the stages before.
    """
    available = [LENGTH, *DOCUMENT_COLUMNS, *measured]
    for key in keys:
        if key.column not in available:
            raise ValueError(
                f"dedup.keep: there is no column {key.column!r}; available at this place of `prepare` are "
                f"{', '.join(available)}"
            )


def read_columns(
    inputs: Mapping[str, Path], shard: str, rows: np.ndarray, keys: Sequence[KeepKey], sketches: pa.Table
) -> pa.Table:
    """Read `id` and the keys' columns of some documents of a shard.

    Args:
        rows: int64, their row numbers.
        sketches: row for row, their `id`, `locator` and `length`.
    """
    wanted = list(dict.fromkeys(["id", *(key.column for key in keys)]))
    stages = measured_columns(inputs)
    columns = {}
    for name in wanted:
        if name in sketches.column_names:
            columns[name] = sketches[name]
        elif name in DOCUMENT_COLUMNS:
            columns[name] = read_documents(inputs, shard, [name])[name].take(pa.array(rows))
        else:
            columns[name] = read_annotations(inputs, shard, stages[name], [name])[name].take(pa.array(rows))
    return pa.table({name: _sortable(values) for name, values in columns.items()})


def _sortable(values: pa.ChunkedArray) -> pa.Array:
    """The values in one array, dictionaries decoded."""
    whole = values.combine_chunks()
    return whole.cast(whole.type.value_type) if pa.types.is_dictionary(whole.type) else whole
