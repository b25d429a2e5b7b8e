"""All documents of a run with everything that its steps said of them, read lazily: shard by shard, column by column.

    corpus = Corpus(inputs, {"web": "CC-BY-4.0"})
    for batch in corpus.batches(["id", "text", "language"], kept=True, where="language_score > 0.9"):
        ...

A document's columns are those of OWN_COLUMNS and each that a step measured, under the name that expressions use
(`expressions.names_of`). Documents come in the order of the shards, whoever reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import hexdigits
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import (
    ID_BYTES,
    JUDGEMENT_COLUMNS,
    annotation_stages,
    open_table,
    read_annotations,
    read_table,
    shard_names,
)
from gristmill.dataprep.edits import EDITS, apply_edits, then
from gristmill.dataprep.expressions import columns_in, evaluate, names_of
from gristmill.dataprep.row_groups import find_ids
from gristmill.mixtures.sources import INGEST

BATCH_ROWS = 1000
TEXT, ORIGINAL_TEXT = "text", "original_text"
OWN_FIELDS = (
    pa.field("id", pa.string()),
    pa.field("source", pa.string()),
    pa.field("locator", pa.string()),
    pa.field("url", pa.string()),
    pa.field("licence", pa.string()),
    pa.field(TEXT, pa.large_string()),
    pa.field("metadata", pa.string()),
    pa.field("kept", pa.bool_()),
    pa.field("dropped_by", pa.string()),
    pa.field("reason", pa.string()),
    pa.field("error", pa.string()),
)
OF_DOCUMENT = ("id", "source", "locator", "metadata")
"""Columns that the document shards have as they are."""
DERIVED = {"url": ("locator", "metadata"), "licence": ("source", "metadata")}
"""Columns that are made of these."""
JUDGED = ("kept", "dropped_by", "reason", "error")
URL_KEYS = ("url", "URL", "uri")
LICENCE_KEYS = ("licence", "license")
RECORD_ID = re.compile(r"#[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")
"""Of a WARC record, which stands behind the address in the locator of a page."""
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint8).reshape(256, 2)


class UnknownColumnError(ValueError):
    """A column was asked for that no document has."""


class UnknownDocumentError(LookupError):
    """No document, or more than one, has an id that begins so."""


@dataclass(frozen=True)
class Corpus:
    """The documents of a run.

    Attributes:
        inputs: `ingest`, and the annotating stages in the order in which they ran; others are passed over.
        licences: source -> what the manifest says of its licence.
    """

    inputs: Mapping[str, Path]
    licences: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def shards(self) -> list[str]:
        """The document shards, in the order of the documents."""
        return shard_names(self.inputs[INGEST])

    @cached_property
    def steps(self) -> list[str]:
        """The steps that judged the documents, in their order."""
        return annotation_stages(self.inputs)

    @cached_property
    def measured(self) -> dict[str, tuple[str, str]]:
        """Name of a column -> the step that measured it, and what it is called there."""
        own = {
            step: [one.name for one in self._step_schemas[step] if one.name not in (*JUDGEMENT_COLUMNS, EDITS)]
            for step in self.steps
        }
        return {name: (step, column) for step, names in names_of(own).items() for column, name in names.items()}

    @cached_property
    def schema(self) -> pa.Schema:
        """Every column with its type; `original_text`, the text before all edits, is the last one."""
        measured = [
            pa.field(name, _shown_type(self._step_schemas[step].field(column).type))
            for name, (step, column) in self.measured.items()
        ]
        return pa.schema([*OWN_FIELDS, *measured, pa.field(ORIGINAL_TEXT, pa.large_string())])

    @property
    def columns(self) -> list[str]:
        """The columns that are read where none are named: all but `original_text`."""
        return [name for name in self.schema.names if name != ORIGINAL_TEXT]

    @cached_property
    def _step_schemas(self) -> dict[str, pa.Schema]:
        """The tables' columns, of each the type in the first shard that has a value."""
        return {step: self._step_schema(step) for step in self.steps}

    def _step_schema(self, step: str) -> pa.Schema:
        found: dict[str, pa.Field] = {}
        for shard in self.shards:
            with open_table(self.inputs[step] / shard) as file:
                for one in file.schema_arrow:
                    if one.name not in found or pa.types.is_null(found[one.name].type):
                        found[one.name] = one
            if not any(pa.types.is_null(one.type) for one in found.values()):
                break
        return pa.schema(list(found.values()))

    def batches(
        self, columns: Sequence[str] | None = None, kept: bool | None = True, where: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read documents, in their order.

        Args:
            columns: which, in this order; all but `original_text` if absent. No other is read.
            kept: those that every step kept, those that one dropped (False), or all (None).
            where: SQL condition over the columns (`expressions.GRAMMAR`); documents of which it is NULL are left out.

        Raises:
            UnknownColumnError: there is no such column.
            gristmill.dataprep.expressions.ExpressionError: the condition is none.
        """
        self.check(columns)
        for shard in self.shards:
            yield from self.read(shard, columns, kept, where).to_batches(max_chunksize=BATCH_ROWS)

    def count_rows(self, kept: bool | None = True, where: str | None = None) -> int:
        """How many documents there are; texts are read only where the condition names them."""
        return sum(len(self.read(shard, ["source"], kept, where)) for shard in self.shards)

    def document(self, wanted: str) -> dict[str, Any]:
        """A whole document.

        Args:
            wanted: its id, or the first digits of it.

        Returns:
            every column, `original_text` among them, and `steps`: of each that judged it `step`, `keep`, `reason`,
            `error` and `values`, what it measured.

        Raises:
            UnknownDocumentError: none, or more than one, fits.
        """
        if not 0 < len(wanted) <= 2 * ID_BYTES or not all(character in hexdigits for character in wanted):
            raise UnknownDocumentError(f"{wanted!r} is no id: 1 to {2 * ID_BYTES} hexadecimal digits")
        places = find_ids(self.inputs[INGEST], self.shards, wanted)
        if len(places) != 1:
            raise UnknownDocumentError(f"{len(places) or 'no'} documents have an id that begins with {wanted!r}")
        shard, row = places[0]
        found: dict[str, Any] = self.read(shard, self.schema.names, None).slice(row, 1).to_pylist()[0]
        return {**found, "steps": self._verdicts(shard, row)}

    def _verdicts(self, shard: str, row: int) -> list[dict[str, Any]]:
        found = []
        for step in self.steps:
            judged = read_annotations(self.inputs, shard, step).slice(row, 1).to_pylist()[0]
            if judged["keep"] is None:
                break
            values = {
                name: value.hex() if isinstance(value, bytes) else value
                for name, value in judged.items()
                if name not in (*JUDGEMENT_COLUMNS, EDITS) and value is not None
            }
            found.append({"step": step, **{name: judged[name] for name in JUDGEMENT_COLUMNS[1:]}, "values": values})
        return found

    def check(self, columns: Sequence[str] | None) -> None:
        """Raise UnknownColumnError where there is no such column."""
        unknown = [name for name in columns or () if name not in self.schema.names]
        if unknown:
            raise UnknownColumnError(f"there is no column {unknown[0]!r}; there are {', '.join(self.schema.names)}")

    def read(
        self, shard: str, columns: Sequence[str] | None = None, kept: bool | None = True, where: str | None = None
    ) -> pa.Table:
        """Read one shard's documents; see `batches`."""
        wanted = self.columns if columns is None else list(columns)
        named = [] if where is None else columns_in(where, self.schema.names)
        reading = _Reading(self, shard, {*wanted, *named}, kept is not None)
        rows = np.arange(len(reading.ids))
        if kept is not None:
            rows = rows[reading.kept == kept]
        if where is not None and len(rows):
            known, values = evaluate(where, "BOOLEAN", reading.table(named or ["id"], rows))
            rows = rows[known & np.where(known, values, False).astype(bool)]
        return reading.table(wanted, rows)


class _Reading:
    """One shard, while it is read: every table of a step once; texts only where a row of theirs is wanted."""

    def __init__(self, corpus: Corpus, shard: str, names: Collection[str], judged: bool) -> None:
        self._corpus, self._shard = corpus, shard
        self._folder = corpus.inputs[INGEST]
        own = {"id", *names, *(one for name in names for one in DERIVED.get(name, ()))} & set(OF_DOCUMENT)
        self._documents = read_table(self._folder / shard, sorted(own))
        self.ids = self._documents["id"]
        self._edits: pa.Array | None = None
        self.kept = np.ones(len(self.ids), bool)
        self._columns: dict[str, pa.Array | pa.ChunkedArray] = {}
        if judged or TEXT in names or {*names} & {*JUDGED, *corpus.measured}:
            self._read_steps(names)

    def _read_steps(self, names: Collection[str]) -> None:
        """Read what the steps said: which rows they kept, why not, their edits as one, and what they measured."""
        why = [name for name in ("reason", "error") if name in names]
        told = {name: pa.nulls(len(self.ids), pa.string()) for name in ("dropped_by", *why)}
        for step in self._corpus.steps:
            measured = {
                name: column
                for name, (owner, column) in self._corpus.measured.items()
                if owner == step and name in names
            }
            edits = [EDITS] if TEXT in names else []
            table = read_annotations(
                self._corpus.inputs, self._shard, step, ["keep", *why, *edits, *measured.values()], self.ids
            )
            # A step has a judgement only on rows that all before it kept.
            keep = pc.fill_null(table["keep"], False).to_numpy().astype(bool)
            drops = pa.array(self.kept & ~keep)
            self.kept &= keep
            told["dropped_by"] = pc.if_else(drops, step, told["dropped_by"])
            for name in why:
                told[name] = pc.if_else(drops, table[name].cast(pa.string()).combine_chunks(), told[name])
            if EDITS in table.column_names:
                own = table[EDITS].combine_chunks()
                self._edits = own if self._edits is None else then(self._edits, own)
            self._columns |= {name: table[column] for name, column in measured.items() if column in table.column_names}
        self._columns |= {**told, "kept": pa.array(self.kept)}

    def table(self, names: Sequence[str], rows: np.ndarray) -> pa.Table:
        """Some columns of some rows, under their types of the schema."""
        schema = self._corpus.schema
        taken = pa.array(rows)
        fields = [schema.field(name) for name in names]
        return pa.table(
            [_shown(self._column(name, taken), one.type) for name, one in zip(names, fields, strict=True)],
            schema=pa.schema(fields),
        )

    def _column(self, name: str, rows: pa.Array) -> pa.Array | pa.ChunkedArray:
        if name in (TEXT, ORIGINAL_TEXT):
            return self._texts(rows, edited=name == TEXT)
        if name in DERIVED:
            given = [self._documents[one].take(rows).to_pylist() for one in DERIVED[name]]
            of = url_of if name == "url" else self._licence
            return pa.array([of(*values) for values in zip(*given, strict=True)], pa.string())
        if name in OF_DOCUMENT:
            return self._documents[name].take(rows)
        # A step leaves a column out where nothing has a value.
        return self._columns[name].take(rows) if name in self._columns else pa.nulls(len(rows))

    def _texts(self, rows: pa.Array, edited: bool) -> pa.Array | pa.ChunkedArray:
        if not len(rows):
            return pa.array([], pa.large_string())
        if TEXT not in self._documents.column_names:
            self._documents = self._documents.append_column(TEXT, read_table(self._folder / self._shard, [TEXT])[TEXT])
        texts = self._documents[TEXT].take(rows)
        return texts if self._edits is None or not edited else apply_edits(texts, self._edits.take(rows))

    def _licence(self, source: str, metadata: str) -> str | None:
        own = _first(metadata, LICENCE_KEYS)
        return own if own is not None else self._corpus.licences.get(source)


def url_of(locator: str, metadata: str | None) -> str | None:
    """The address that a document came from, where its metadata (JSON) or its locator has one."""
    url = _first(metadata, URL_KEYS)
    return RECORD_ID.sub("", locator) if url is None and "://" in locator else url


def urls_of(documents: pa.Table) -> pa.Array:
    """`url_of` for documents with the columns `locator` and `metadata`."""
    pairs = zip(documents["locator"].to_pylist(), documents["metadata"].to_pylist(), strict=True)
    return pa.array([url_of(*pair) for pair in pairs], pa.string())


def _first(metadata: str | None, keys: Sequence[str]) -> str | None:
    """The text behind the first of some keys that metadata has one behind."""
    if not metadata or not any(f'"{key}"' in metadata for key in keys):
        return None
    values = json.loads(metadata)
    return next((values[key] for key in keys if isinstance(values.get(key), str)), None)


def _shown_type(kind: pa.DataType) -> pa.DataType:
    """The type under which a measured column is shown: ids in hexadecimal, dictionaries decoded."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.string() if pa.types.is_fixed_size_binary(kind) else kind


def _shown(values: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if pa.types.is_fixed_size_binary(values.type):
        return hex_ids(values)
    return values if values.type == kind else values.cast(kind)


def hex_ids(ids: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Ids in hexadecimal; null where one is."""
    valid = pc.fill_null(ids, bytes(ids.type.byte_width)) if ids.null_count else ids
    width = 2 * ids.type.byte_width
    digits = _HEX[np.frombuffer(b"".join(valid.to_pylist()), np.uint8)]
    offsets = np.arange(0, (len(ids) + 1) * width, width, dtype=np.int32)
    texts = pa.StringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digits)))
    return pc.if_else(ids.is_valid(), texts, None) if ids.null_count else texts
