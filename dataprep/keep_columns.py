"""The columns by which `dedup.keep` may choose a survivor: of the documents, and measured by earlier stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.dataprep.clusters import KeepKey
from gristmill.dataprep.documents import ID_BYTES, annotation_stages, read_annotations, read_documents
from gristmill.dataprep.sketches import Numbering, load_sketches

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
    available = [LENGTH, *DOCUMENT_COLUMNS, *measured_columns(inputs)]
    for key in keys:
        if key.column not in available:
            raise ValueError(
                f"dedup.keep: there is no column {key.column!r}; available at this place of `prepare` are "
                f"{', '.join(available)}"
            )


def read_columns(
    inputs: Mapping[str, Path], work: Path, numbering: Numbering, documents: np.ndarray, keys: Sequence[KeepKey]
) -> pa.Table:
    """Read `id` and the keys' columns of some documents that take part.

    Args:
        documents: int64, ascending and distinct.

    Returns:
        one row per document, in their order.
    """
    wanted = list(dict.fromkeys(["id", *(key.column for key in keys)]))
    stages = measured_columns(inputs)
    parts: dict[str, list[pa.Array]] = {name: [] for name in wanted}
    for shard, rows in numbering.split(documents):
        name, take = numbering.shards[shard], pa.array(rows)
        own = read_documents(inputs, name, [column for column in wanted if column in DOCUMENT_COLUMNS])
        for column in wanted:
            if column == LENGTH:
                values = pa.array(load_sketches(work, numbering, numbering.starts[shard] + rows).lengths)
            elif column in DOCUMENT_COLUMNS:
                values = own[column].take(take)
            else:
                values = read_annotations(inputs, name, stages[column], [column])[column].take(take)
            parts[column].append(_sortable(values))
    if not len(documents):
        return pa.table({name: pa.array([], pa.binary(ID_BYTES)) for name in wanted})
    return pa.table({name: pa.chunked_array(values) for name, values in parts.items()})


def _sortable(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The values in one array, dictionaries decoded."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values
