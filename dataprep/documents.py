"""Tables passed between preparing stages: immutable document shards, and an annotation
table per stage and shard.

Documents (`ingest`): `part-*.parquet` with `id`, `source`, `locator`, `text`,
`metadata`. Annotations (`filter`, `dedup`, `langid`, ...): files with the same names
and the same rows in the same order, with `id` repeated and checked on every read,
`keep`, `reason`, `error`, all measured values and, if a stage changes text, `edits`
(see `edits.py`). Rows dropped by an earlier stage are null in all columns but `id`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.core.arrays import Column
from gristmill.core.files import REPAIR, as_path, atomic_write, is_local
from gristmill.dataprep.conservation import Counts, SourceCounts, add_counts
from gristmill.dataprep.edits import EDITS, apply_edits, size_changes, then
from gristmill.mixtures.schema.sources import INGEST

ID_BYTES = 16
ROW_GROUP_ROWS = 2000
QUARANTINE_REASON = "quarantine"
Inputs = Mapping[str, Path]
"""Folders that a stage reads: `ingest`, and those of the annotating stages in the order
in which they ran.
"""
Remarks = Sequence[str | None]
"""A reason or an error per document, or None."""
JUDGEMENT_COLUMNS = ("id", "keep", "reason", "error")
"""Columns of every annotation table; all others are measured values or `edits`."""
MERGED = "merged"
"""Stage name that replaces all annotating stages before it
(`annotate_batches.merge_annotations`).
"""

DOCUMENT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.binary(ID_BYTES), nullable=False),
        pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("locator", pa.string(), nullable=False),
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)
REPEATING = ("source", "metadata")
"""Document columns with few distinct values, written with a dictionary. Parquet
abandons a dictionary of texts after a megabyte, at a tenth of the cost of reading them.
"""
QUARANTINE_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("file", pa.string()),
        ("record", pa.int64()),
        ("error", pa.string()),
        ("excerpt", pa.string()),
    ]
)


class MisalignedError(RuntimeError):
    """An annotation table does not belong to the document shard that it was read
    for.
    """


class DamagedTableError(RuntimeError):
    """A table that a stage wrote is damaged."""


def document_id(source: str, locator: str, text: str) -> bytes:
    """16-byte id of a document: hash of source, locator and text."""
    return hash_document(
        source.encode("utf-8"), locator.encode("utf-8"), text.encode("utf-8")
    )


def hash_document(source: bytes, locator: bytes, text: bytes) -> bytes:
    """`document_id` of values already encoded as UTF-8."""
    sizes = [len(part).to_bytes(8, "little") for part in (source, locator, text)]
    digest = hashlib.blake2b(
        b"".join((sizes[0], source, sizes[1], locator, sizes[2])), digest_size=ID_BYTES
    )
    digest.update(text)
    return digest.digest()


def hash_documents(source: bytes, locators: pa.Array, texts: pa.Array) -> pa.Array:
    """`document_id` of n documents of a source.

    Args:
        source: its name (UTF-8).
        locators: n strings.
        texts: n large strings.
    """
    begin = len(source).to_bytes(8, "little") + source
    columns = (*_with_sizes(locators, np.int32), *_with_sizes(texts, np.int64))
    ids = b"".join(
        [
            hashlib.blake2b(b"".join((begin, *parts)), digest_size=ID_BYTES).digest()
            for parts in zip(*columns, strict=True)
        ]
    )
    return pa.Array.from_buffers(
        DOCUMENT_SCHEMA.field("id").type, len(texts), [None, pa.py_buffer(ids)]
    )


def _with_sizes(
    values: pa.Array, offset: type[np.integer[Any]]
) -> tuple[Iterator[bytes], Iterator[memoryview]]:
    """Size of each string as 8 bytes (little-endian), and its bytes."""
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, offset)[
        values.offset : values.offset + len(values) + 1
    ]
    sizes = np.diff(bounds).astype("<i8").tobytes()
    content = memoryview(data)
    return (
        (sizes[place : place + 8] for place in range(0, len(sizes), 8)),
        (content[begin:end] for begin, end in pairwise(bounds.tolist())),
    )


def write_table(
    path: Path,
    table: pa.Table,
    row_group_rows: int = ROW_GROUP_ROWS,
    repeating: Sequence[str] | None = None,
    durable: bool = True,
) -> None:
    """Write a Parquet file atomically; the same table gives the same bytes.

    Args:
        path: final name.
        table: its content.
        row_group_rows: rows per row group.
        repeating: columns written with a dictionary; if None, REPEATING for documents
            and all columns of other tables. Distinct values, such as ids, are written
            in two thirds of the time without a dictionary.
        durable: see `atomic_write`.
    """
    if repeating is None and table.schema.equals(DOCUMENT_SCHEMA):
        repeating = REPEATING
    with atomic_write(path, durable) as sink:
        # A compressed page with a flipped bit may still decompress; page checksums
        # detect it.
        pq.write_table(
            table,
            sink,
            compression="zstd",
            row_group_size=row_group_rows,
            write_page_checksum=True,
            use_dictionary=True if repeating is None else list(repeating),
        )


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; read from it with `use_threads=False` unless it is local.

    Avoids `pyarrow.parquet.read_table` and Python files on Arrow's threads: these may
    release the file after the interpreter has begun to shut down, which aborts the
    process.
    """
    with (
        nullcontext(str(path)) if is_local(path) else path.open("rb") as source,
        # Pre-buffering hides the latency of a remote store; for a local file it only
        # costs.
        pq.ParquetFile(
            source, pre_buffer=False, page_checksum_verification=True
        ) as file,
    ):
        yield file


@contextmanager
def open_table(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a table that a stage wrote, like `open_parquet`.

    Raises:
        DamagedTableError: the table is damaged; also raised while it is read.
    """
    try:
        with open_parquet(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        # an error of the disk or store, not of the content
        if isinstance(error, OSError) and error.errno is not None:
            raise
        message = " ".join(str(error).split())
        raise DamagedTableError(
            f"{path} is damaged: {message}; `{REPAIR}` and a run make it again"
        ) from error


def stored_text_bytes(file: pq.ParquetFile) -> int:
    """Bytes of the column `text` before compression."""
    place = file.schema_arrow.names.index("text")
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    return sum(group.column(place).total_uncompressed_size for group in groups)


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table that a stage wrote, or some of its columns.

    Raises:
        DamagedTableError: the table is damaged.
    """
    with open_table(path) as file:
        return file.read(columns, use_threads=is_local(path))


def shard_names(ingest: Path) -> list[str]:
    """Names of the document shards of a committed ingest, in order."""
    return sorted(path.name for path in ingest.glob("part-*.parquet"))


def annotation_stages(inputs: Inputs) -> list[str]:
    """Annotating stages among a stage's inputs, in the order in which they ran."""
    return [
        name
        for name, folder in inputs.items()
        if name != INGEST and _has_shards(str(folder))
    ]


@cache
def _has_shards(folder: str) -> bool:
    """True if a committed output has tables named like document shards."""
    # Files that `tokenize` writes per shard have one more dot in their names.
    return any("." not in path.stem for path in as_path(folder).glob("part-*.parquet"))


@dataclass(frozen=True)
class Shard:
    """A document shard after the stages so far.

    Attributes:
        documents: the requested columns; the text has the edits of all stages.
        rows: int64, ascending: rows kept by every stage.
        judged: int64, ascending: those of the sources that the next stage judges.
    """

    documents: pa.Table
    rows: np.ndarray
    judged: np.ndarray

    @property
    def judged_documents(self) -> pa.Table:
        """The judged rows of the documents."""
        if len(self.judged) == len(self.documents):
            return self.documents
        return self.documents.take(self.judged)

    def write(
        self,
        path: Path,
        reasons: Remarks | pa.Array,
        measures: Mapping[str, pa.Array],
        errors: Remarks | pa.Array | None = None,
        sizes: pa.Array | None = None,
    ) -> Counts:
        """Write the annotation table of the shard, and return its counts; arguments as
        in `annotate`.
        """
        table, counts = annotate(
            self.documents, self.rows, self.judged, reasons, measures, errors, sizes
        )
        write_table(path, table)
        return counts

    def write_measured(
        self,
        path: Path,
        reasons: Remarks | np.ndarray,
        measures: Mapping[str, np.ndarray | pa.Array],
        errors: Remarks,
    ) -> Counts:
        """`write` with reasons and measures for the judged rows without an error."""
        columns = {name: spread(values, errors) for name, values in measures.items()}
        all_reasons = spread(pa.array(reasons, pa.string()), errors)
        return self.write(path, all_reasons, columns, errors)


def read_shard(
    inputs: Inputs,
    shard: str,
    columns: Sequence[str] | None = None,
    sources: Sequence[str] | None = None,
) -> Shard:
    """Read a shard with the annotations of all stages among the inputs, each table
    once.

    Args:
        inputs: `ingest`, and the annotating stages in the order in which they ran.
        shard: name of the shard.
        columns: of the documents (all if None), or measured by a stage (the last stage
            that has the column; null if no stage has it).
        sources: the judged ones, for which `source` must be a column; all if None.

    Raises:
        MisalignedError: a table's ids differ from the document shard's, in number or in
            order.
    """
    schema_names = DOCUMENT_SCHEMA.names
    measured = [name for name in columns or () if name not in schema_names]
    document_columns = None
    if columns is not None:
        document_names = [name for name in columns if name in schema_names]
        document_columns = list(dict.fromkeys(["id", *document_names]))
    documents = read_table(inputs[INGEST] / shard, document_columns)
    edits = [EDITS] if "text" in documents.column_names else []
    annotations = combine_annotations(
        inputs, shard, documents["id"], [*edits, *measured]
    )
    if EDITS in edits and annotations.edits is not None:
        text = apply_edits(documents["text"], annotations.edits)
        documents = documents.set_column(
            documents.column_names.index("text"), DOCUMENT_SCHEMA.field("text"), text
        )
    for name in measured:
        values = annotations.measured.get(name, pa.nulls(len(documents)))
        documents = documents.append_column(name, values)
    if columns is not None:
        documents = documents.select(columns)
    rows = np.flatnonzero(annotations.keep)
    return Shard(documents, rows, judged_rows(documents, rows, sources))


def read_documents(
    inputs: Inputs, shard: str, columns: Sequence[str] | None = None
) -> pa.Table:
    """Read a document shard (all columns, or some) with the edits of the stages among
    the inputs.
    """
    if columns is None or "text" in columns:
        return read_shard(inputs, shard, columns).documents
    return read_table(inputs[INGEST] / shard, columns)


def kept_rows(inputs: Inputs, shard: str) -> np.ndarray:
    """Row numbers (int64, ascending) kept by every annotating stage among the
    inputs.
    """
    return read_shard(inputs, shard, ["id"]).rows


@dataclass(frozen=True)
class Combined:
    """Annotations of several stages on the n documents of a shard, combined.

    Attributes:
        keep: bool of shape (n,): kept by every stage.
        edits: n lists, the composed edits of all stages; None if no stage edits.
        measured: column name -> n values.
    """

    keep: np.ndarray
    edits: pa.Array | None
    measured: Mapping[str, pa.ChunkedArray]


def combine_annotations(
    inputs: Inputs,
    shard: str,
    ids: pa.ChunkedArray,
    columns: Sequence[str] = (),
) -> Combined:
    """Read the annotations of all stages among the inputs, each table once.

    Args:
        inputs: `ingest`, and the annotating stages in the order in which they ran.
        shard: name of the shard.
        ids: of its documents.
        columns: read besides `keep` from the tables that have them; EDITS are composed,
            for others the last stage wins.

    Raises:
        MisalignedError: see `read_annotations`.
    """
    keep = np.ones(len(ids), bool)
    edits: pa.Array | None = None
    measured: dict[str, pa.ChunkedArray] = {}
    for stage in annotation_stages(inputs):
        with open_table(inputs[stage] / shard) as file:
            there = file.schema_arrow.names
            names = [name for name in ("id", "keep", *columns) if name in there]
            table = file.read(names, use_threads=is_local(inputs[stage]))
        check_ids(inputs, shard, stage, table["id"], ids)
        # `keep` is null on rows that an earlier stage dropped.
        keep &= pc.fill_null(table["keep"], False).to_numpy()
        if EDITS in names:
            stage_edits = table[EDITS].combine_chunks()
            edits = stage_edits if edits is None else then(edits, stage_edits)
        measured |= {name: table[name] for name in names if name in columns}
    return Combined(keep, edits, measured)


def step_with(inputs: Inputs, shard: str, column: str) -> str | None:
    """Last step among the inputs that measured a column of a shard, or None."""
    steps = (
        step
        for step in reversed(annotation_stages(inputs))
        if column in column_names(inputs[step] / shard)
    )
    return next(steps, None)


def column_names(path: Path) -> list[str]:
    """Column names of a table that a stage wrote."""
    with open_table(path) as file:
        return file.schema_arrow.names


def read_annotations(
    inputs: Inputs,
    shard: str,
    stage: str,
    columns: Sequence[str] | None = None,
    ids: pa.ChunkedArray | None = None,
) -> pa.Table:
    """Read one stage's annotations of a shard after checking its ids.

    Args:
        inputs: `ingest`, and the annotating stages.
        shard: name of the shard.
        stage: name of the stage.
        columns: read besides `id`; all if None.
        ids: of the shard's documents, if already read.

    Raises:
        MisalignedError: ids differ from the document shard's, in number or in order.
    """
    table_columns = (
        None if columns is None else ["id", *(name for name in columns if name != "id")]
    )
    table = read_table(inputs[stage] / shard, table_columns)
    if ids is None:
        ids = read_table(inputs[INGEST] / shard, ["id"])["id"]
    check_ids(inputs, shard, stage, table["id"], ids)
    return table


def check_ids(
    inputs: Inputs,
    shard: str,
    stage: str,
    found: pa.ChunkedArray,
    ids: pa.ChunkedArray,
) -> None:
    """Raise MisalignedError if a stage's ids differ from those of the shard's
    documents.
    """
    if not found.combine_chunks().equals(ids.combine_chunks()):
        raise MisalignedError(
            f"{inputs[stage] / shard}: its ids are not those of "
            f"{inputs[INGEST] / shard}; "
            f"rerun the stage: gristmill stage {stage} MANIFEST --force"
        )


def as_numbers(values: Column) -> np.ndarray:
    """Convert a column to float64: NaN for null, 1 for true."""
    return pc.fill_null(values.cast(pa.float64()), math.nan).to_numpy(
        zero_copy_only=False
    )


def judged_rows(
    documents: pa.Table, rows: np.ndarray, sources: Sequence[str] | None
) -> np.ndarray:
    """Rows whose source the stage judges (all if `sources` is None)."""
    if sources is None:
        return rows
    column = documents["source"].take(rows).cast(pa.string())
    member = pc.is_in(column, value_set=pa.array(list(sources), pa.string()))
    return rows[member.to_numpy()]


def spread(values: np.ndarray | pa.Array, errors: Remarks) -> pa.Array:
    """Measured column with null for every text that raised, and for NaN, which means
    "does not apply".
    """
    is_measured = np.array([error is None for error in errors], bool)
    rows = np.cumsum(is_measured) - 1
    column = (
        values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
    )
    return column.take(pa.array(rows, mask=~is_measured))


def positions(rows: np.ndarray, chosen: np.ndarray) -> pa.Array:
    """Position of each row among the chosen ones, null for others; both ascending."""
    position = np.full(len(rows), -1)
    position[np.searchsorted(rows, chosen)] = np.arange(len(chosen))
    return pa.array(position, mask=position < 0)


def annotate(
    documents: pa.Table,
    rows: np.ndarray,
    judged: np.ndarray,
    reasons: Remarks | pa.Array,
    measures: Mapping[str, pa.Array],
    errors: Remarks | pa.Array | None = None,
    sizes: pa.Array | None = None,
) -> tuple[pa.Table, Counts]:
    """Build the annotation table of a shard and its counts.

    Args:
        documents: the shard, with at least `id`, `source` and, without `sizes`, `text`.
        rows: rows that earlier stages kept.
        judged: the subset of `rows` that this stage judged; all other rows pass.
        reasons: per judged row, the rule that dropped it, or None if kept.
        measures: column name -> one value per judged row; `edits` (see `edits.py`)
            change the kept text.
        errors: per judged row, the error that quarantines it, or None.
        sizes: bytes of each document's text (int64).
    """
    total = len(documents)
    take = positions(np.arange(total), judged)
    error = pa.array([None] * len(judged) if errors is None else errors, pa.string())
    if not len(error) == len(reasons) == len(judged):
        raise ValueError(
            f"{len(judged)} documents were judged, with {len(reasons)} "
            f"reasons and {len(error)} errors"
        )
    reason = pc.if_else(
        error.is_valid(), QUARANTINE_REASON, pa.array(reasons, pa.string())
    )
    incoming = np.zeros(total, bool)
    incoming[rows] = True
    keep = np.ones(total, bool)
    keep[judged] = reason.is_null().to_numpy(zero_copy_only=False)
    columns = {
        "id": documents["id"].combine_chunks(),
        "keep": pa.array(keep, mask=~incoming),
        "reason": reason.take(take).dictionary_encode(),
        "error": error.take(take),
        **{name: values.take(take) for name, values in measures.items()},
    }
    grown = np.zeros(total, np.int64)
    if EDITS in measures:
        grown[judged] = size_changes(measures[EDITS])
    return pa.table(columns), count_documents(
        documents, rows, columns["reason"], grown, sizes
    )


def count_documents(
    documents: pa.Table,
    rows: np.ndarray,
    reasons: pa.Array,
    changes: np.ndarray,
    sizes: pa.Array | None = None,
) -> Counts:
    """Count a shard's documents: read, kept, dropped by rule and quarantined, in total
    and per source.

    Args:
        documents: the shard's n documents.
        rows: int64, rows kept by earlier stages.
        reasons: n strings, null for kept documents.
        changes: int64 of shape (n,), bytes that the stage's edits add to each text.
        sizes: bytes of each text (int64); measured from the column `text` if None.
    """
    if sizes is None:
        sizes = pc.binary_length(documents["text"]).cast(pa.int64())
    table = pa.table(
        {
            "source": documents["source"].cast(pa.string()),
            "reason": reasons.cast(pa.string()),
            "bytes": sizes,
            "bytes_after": pc.add(sizes, changes),
        }
    ).take(rows)
    groups = table.group_by(["source", "reason"]).aggregate(
        [([], "count_all"), ("bytes", "sum"), ("bytes_after", "sum")]
    )
    by_source: dict[str, list[SourceCounts]] = {}
    for group in groups.sort_by(
        [("source", "ascending"), ("reason", "ascending")]
    ).to_pylist():
        number, reason = group["count_all"], group["reason"]
        counts = SourceCounts(read=number, bytes_read=group["bytes_sum"])
        if reason is None:
            counts["kept"] = number
            counts["bytes_kept"] = group["bytes_after_sum"]
        elif reason == QUARANTINE_REASON:
            counts["quarantined"] = number
        else:
            counts["dropped"] = {reason: number}
        by_source.setdefault(group["source"], []).append(counts)
    sources = {
        name: add_counts([_NOTHING, *parts]) for name, parts in by_source.items()
    }
    return {**add_counts([_NOTHING, *sources.values()]), "sources": sources}


_NOTHING = SourceCounts(
    read=0, kept=0, dropped={}, quarantined=0, bytes_read=0, bytes_kept=0
)
