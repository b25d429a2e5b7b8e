"""Documents of a run with the annotations of all steps, read lazily by shard and
column.

    corpus = Corpus(inputs, {"web": "CC-BY-4.0"})
    columns = ["id", "text", "language"]
    for shard in corpus.shards:
        table = corpus.read(shard, columns, kept=True, where="language_score > 0.9")

A document's columns are OWN_COLUMNS and all measured columns, under their names in
expressions (`where_sql.names_of`). Documents are always in the order of the shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column, hex_ids
from gristmill.dataprep.documents import (
    JUDGEMENT_COLUMNS,
    Inputs,
    annotation_stages,
    open_table,
    read_annotations,
    read_table,
    shard_names,
)
from gristmill.dataprep.edits import EDITS, apply_edits, then
from gristmill.dataprep.licences.statements import of_metadata
from gristmill.dataprep.where_sql import (
    OWN_COLUMNS,
    StepColumns,
    columns_in,
    evaluate,
    names_of,
)
from gristmill.mixtures.schema.sources import INGEST
from gristmill.mixtures.yaml_text import unknown_name

CLUSTERS = "clusters.parquet"
"""File of the duplicates in an output of `dedup` and `dedup_semantic`."""
TEXT, ORIGINAL_TEXT = "text", "original_text"
OWN_FIELDS = tuple(
    pa.field(
        name,
        {TEXT: pa.large_string(), "kept": pa.bool_()}.get(name, pa.string()),
    )
    for name in OWN_COLUMNS
    if name != ORIGINAL_TEXT
)
OF_DOCUMENT = ("id", "source", "locator", "metadata")
"""Columns taken unchanged from the document shards."""
DERIVED = {"url": ("locator", "metadata"), "licence": ("source", "metadata")}
"""Derived column -> the columns that it is computed from."""
JUDGED = ("kept", "dropped_by", "reason", "error")
URL_KEYS = ("url", "URL", "uri")
RECORD_ID = re.compile(r"#[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")
"""Record id of a WARC record, after the address in the locator of a page."""


class UnknownColumnError(ValueError):
    """A requested column does not exist."""


@dataclass(frozen=True)
class Corpus:
    """The documents of a run.

    Attributes:
        inputs: `ingest`, and the annotating stages in the order in which they ran;
            other stages are ignored.
        licences: source -> its licence in the manifest.
    """

    inputs: Inputs
    licences: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def shards(self) -> list[str]:
        """Document shards, in order."""
        return shard_names(self.inputs[INGEST])

    @cached_property
    def steps(self) -> list[str]:
        """Steps that judged the documents, in the order in which they ran."""
        return annotation_stages(self.inputs)

    @cached_property
    def measured(self) -> StepColumns:
        """Column name -> the step that measured it, and its name there."""
        step_columns = {
            step: [
                column.name
                for column in self._step_schemas[step]
                if column.name not in (*JUDGEMENT_COLUMNS, EDITS)
            ]
            for step in self.steps
        }
        return {
            name: (step, column)
            for step, names in names_of(step_columns).items()
            for column, name in names.items()
        }

    def last_measured(self, column: str) -> str | None:
        """Name of a column of the last step that measured it, or None."""
        measured = reversed(self.measured.items())
        return next((name for name, (_, own) in measured if own == column), None)

    @cached_property
    def schema(self) -> pa.Schema:
        """All columns with their types; the last is `original_text`, the text before
        all edits.
        """
        fields = [*OWN_FIELDS]
        for name, (step, column) in self.measured.items():
            kind = self._step_schemas[step].field(column).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            # ids are shown in hexadecimal
            is_id = pa.types.is_fixed_size_binary(kind)
            fields.append(pa.field(name, pa.string() if is_id else kind))
        return pa.schema([*fields, pa.field(ORIGINAL_TEXT, pa.large_string())])

    @property
    def columns(self) -> list[str]:
        """Columns read by default: all but `original_text`."""
        return [name for name in self.schema.names if name != ORIGINAL_TEXT]

    @cached_property
    def _step_schemas(self) -> dict[str, pa.Schema]:
        """Schema of each step's tables; a column has its type in the first shard with a
        value.
        """
        schemas = {}
        for step in self.steps:
            fields: dict[str, pa.Field] = {}
            for shard in self.shards:
                with open_table(self.inputs[step] / shard) as file:
                    for column in file.schema_arrow:
                        before = fields.get(column.name)
                        if before is None or pa.types.is_null(before.type):
                            fields[column.name] = column
                if not any(pa.types.is_null(column.type) for column in fields.values()):
                    break
            schemas[step] = pa.schema(list(fields.values()))
        return schemas

    def count_rows(self, kept: bool | None = True, where: str | None = None) -> int:
        """Number of documents; texts are read only if the condition names them."""
        return sum(
            len(self.read(shard, ["source"], kept, where)) for shard in self.shards
        )

    def check(self, columns: Sequence[str] | None) -> None:
        """Raise UnknownColumnError if a column does not exist."""
        unknown = [name for name in columns or () if name not in self.schema.names]
        if unknown:
            raise UnknownColumnError(
                f"there is no column {unknown_name(unknown[0], self.schema.names)}"
            )

    def read(
        self,
        shard: str,
        columns: Sequence[str] | None = None,
        kept: bool | None = True,
        where: str | None = None,
    ) -> pa.Table:
        """Read one shard's documents, in their order.

        Args:
            shard: one of `shards`.
            columns: names, in the order of the result; all but `original_text` if None.
                Other columns are not read.
            kept: documents kept by every step (True), dropped by a step (False), or all
                (None).
            where: SQL condition over the columns (`where_sql.GRAMMAR`); documents for
                which it is NULL are skipped.

        Raises:
            gristmill.dataprep.where_sql.ExpressionError: the condition is invalid.
        """
        selected = self.columns if columns is None else columns
        names = [] if where is None else columns_in(where, self.schema.names)
        reading = _Reading(self, shard, {*selected, *names}, kept is not None)
        rows = np.arange(len(reading.ids))
        if kept is not None:
            rows = rows[reading.kept == kept]
        if where is not None and len(rows):
            table = reading.table(names or ["id"], rows)
            is_valid, values = evaluate(where, "BOOLEAN", table)
            rows = rows[is_valid & np.where(is_valid, values, False).astype(bool)]
        return reading.table(selected, rows)


class _Reading:
    """Reader of one shard: each step's table is read once, texts only for selected
    rows.
    """

    def __init__(
        self, corpus: Corpus, shard: str, names: Collection[str], judged: bool
    ) -> None:
        self._corpus = corpus
        self._shard = shard
        self._folder = corpus.inputs[INGEST]
        derived = chain.from_iterable(DERIVED.get(name, ()) for name in names)
        document_columns = {"id", *names, *derived} & set(OF_DOCUMENT)
        self._documents = read_table(self._folder / shard, sorted(document_columns))
        self.ids = self._documents["id"]
        self._edits: pa.Array | None = None
        self.kept = np.ones(len(self.ids), bool)
        self._columns: dict[str, Column] = {}
        if judged or TEXT in names or {*names} & {*JUDGED, *corpus.measured}:
            self._read_steps(names)

    def _read_steps(self, names: Collection[str]) -> None:
        """Read the annotations: kept rows, reasons for drops, composed edits, and
        measured columns.
        """
        length = len(self.ids)
        reason_columns = [name for name in ("reason", "error") if name in names]
        drop_columns = {
            name: pa.nulls(length, pa.string())
            for name in ("dropped_by", *reason_columns)
        }
        edits = [EDITS] if TEXT in names else []
        for step in self._corpus.steps:
            measured = {
                name: column
                for name, (owner, column) in self._corpus.measured.items()
                if owner == step and name in names
            }
            table = read_annotations(
                self._corpus.inputs,
                self._shard,
                step,
                ["keep", *reason_columns, *edits, *measured.values()],
                self.ids,
            )
            # `keep` is null on rows that an earlier step dropped.
            keep = pc.fill_null(table["keep"], False).to_numpy()
            drops = self.kept & ~keep
            self.kept &= keep
            reasons = {
                "dropped_by": pa.scalar(step),
                **{
                    name: table[name].cast(pa.string()).combine_chunks()
                    for name in reason_columns
                },
            }
            for name, reason in reasons.items():
                drop_columns[name] = pc.if_else(drops, reason, drop_columns[name])
            if EDITS in table.column_names:
                step_edits = table[EDITS].combine_chunks()
                self._edits = (
                    step_edits if self._edits is None else then(self._edits, step_edits)
                )
            self._columns |= {
                name: table[column]
                for name, column in measured.items()
                if column in table.column_names
            }
        self._columns |= {**drop_columns, "kept": pa.array(self.kept)}

    def table(self, names: Sequence[str], rows: np.ndarray) -> pa.Table:
        """Columns of selected rows, with the types of the schema."""
        schema = self._corpus.schema
        row_numbers = pa.array(rows)
        fields = [schema.field(name) for name in names]
        columns: list[Column] = []
        for field_ in fields:
            column = self._column(field_.name, row_numbers)
            if pa.types.is_fixed_size_binary(column.type):
                column = hex_ids(column)
            elif column.type != field_.type:
                column = column.cast(field_.type)
            columns.append(column)
        return pa.table(columns, schema=pa.schema(fields))

    def _column(self, name: str, rows: pa.Array) -> Column:
        if name in (TEXT, ORIGINAL_TEXT):
            if not len(rows):
                return pa.array([], pa.large_string())
            if TEXT not in self._documents.column_names:
                self._documents = self._documents.append_column(
                    TEXT, read_table(self._folder / self._shard, [TEXT])[TEXT]
                )
            texts = self._documents[TEXT].take(rows)
            if self._edits is None or name == ORIGINAL_TEXT:
                return texts
            return apply_edits(texts, self._edits.take(rows))
        if name == "url":
            return urls_of(self._documents.select(DERIVED[name]).take(rows))
        if name == "licence":
            licences = []
            documents = self._documents.select(DERIVED[name]).take(rows)
            for source, metadata in zip(
                *(column.to_pylist() for column in documents.columns), strict=True
            ):
                statement = of_metadata(metadata)
                of_source = self._corpus.licences.get(source)
                licences.append(statement.licence if statement else of_source)
            return pa.array(licences, pa.string())
        if name in OF_DOCUMENT:
            return self._documents[name].take(rows)
        # A step omits a column without values.
        return (
            self._columns[name].take(rows)
            if name in self._columns
            else pa.nulls(len(rows))
        )


def url_of(locator: str, metadata: str | None) -> str | None:
    """URL of a document from its metadata (JSON) or its locator, or None."""
    url = _first(metadata, URL_KEYS)
    return RECORD_ID.sub("", locator) if url is None and "://" in locator else url


def urls_of(documents: pa.Table) -> pa.Array:
    """`url_of` of all documents; needs the columns `locator` and `metadata`."""
    columns = (documents[name].to_pylist() for name in ("locator", "metadata"))
    return pa.array(map(url_of, *columns), pa.string())


def _first(metadata: str | None, keys: Sequence[str]) -> str | None:
    """Value of the first key whose value in the metadata is a string, or None."""
    if not metadata or not any(f'"{key}"' in metadata for key in keys):
        return None
    values = json.loads(metadata)
    return next((values[key] for key in keys if isinstance(values.get(key), str)), None)
