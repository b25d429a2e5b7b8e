"""Writing a packed set in the formats that other trainers read, with checksums and
instructions for reading it.

    llmc      train_000000.bin ...              llm.c, modded-nanogpt
    megatron  train_text_document.bin and .idx  Megatron-LM
    memmap    train.bin                         nanoGPT and other readers of raw tokens
    olmo      train-00000.npy and .csv.gz ...   OLMo-core

Each file has a `<name>.docs.parquet` beside it (`write_documents`), and each split a
`train.json` (a description of the export) and a `train.sha256` (written last;
`sha256sum -c` reads it). The held-out rows have `val` in place of `train`.

Padding is left out, because other trainers would take it for text. The tokens of
documents and their ends of text are exported unchanged and in the requested order, so
a set packed as `stream` also keeps its rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.core.files import (
    atomic_write,
    is_local,
    sha256_file,
    write_json,
    write_text,
)
from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.exporting.hashed_files import HashedSink, hashed_write
from gristmill.tokenize.document_sampling import word_ids
from gristmill.tokenize.exporting import formats
from gristmill.tokenize.exporting.exported_rows import Scratch, Split
from gristmill.tokenize.exporting.formats import readme
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import TokenizerEntry

FORMATS = ("llmc", "megatron", "memmap", "olmo")
SHARDED = ("llmc", "olmo")
SPLITS = {"train": "train", "validation": "val"}
"""Side of the packed set -> prefix of its files."""
SHARD_TOKENS = 100_000_000
"""Tokens per file of sharded formats, as in dev/data/fineweb.py of llm.c."""


class ExportError(ValueError):
    """An export that cannot be written."""


@dataclass(frozen=True)
class ExportedFile:
    """Rows of one exported file.

    Attributes:
        name: of the file, without its ending.
        first: first position in the order.
        stop: end of its positions.
        tokens: of documents.
    """

    name: str
    first: int
    stop: int
    tokens: int

    def described(self) -> FileEntry:
        """Entry in `<split>.json`."""
        rows = self.stop - self.first
        return {"name": self.name, "rows": rows, "tokens": self.tokens}


class FileEntry(TypedDict):
    """An exported file in `<split>.json`."""

    name: str
    rows: int
    tokens: int


class Export(TypedDict):
    """`<split>.json`: one exported side of a packed set."""

    format: str
    split: str
    order: str
    """`stored`, or `trained` for that of a training."""
    seed: int | None
    rows: int
    sequence_length: int
    tokens: int
    """Tokens of documents."""
    documents: int
    """Number of document pieces."""
    dtype: str
    packing: str | None
    """Packing of the set; None for a set of examples."""
    padding_left_out: int
    """Number of padding tokens."""
    sources: list[str]
    tokenizer: TokenizerEntry
    packed_set: str
    """Fingerprint of the set."""
    files: list[FileEntry]
    sha256: NotRequired[dict[str, str]]
    """Checksum of every file by name; not in the file itself."""


def export_tokens(
    packed: PackedSet,
    out: Path,
    form: str,
    split: str = "train",
    seed: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> Export:
    """Export one side of a packed set.

    Args:
        packed: the set.
        out: folder without files of this split.
        form: one of FORMATS.
        split: one of SPLITS.
        seed: of the training order, of which one epoch is written; absent: the rows as
            they are stored.
        shard_tokens: most tokens per file, where the format has several files; a file
            holds whole rows.

    Raises:
        ExportError: there is nothing to export, a file exists already, or the format
            cannot hold the set.
    """
    prefix = SPLITS[split]
    if split == "train" and seed is None and len(packed.withheld):
        raise ExportError(
            f"{packed.folder}: {len(packed.withheld)} of its rows are withheld "
            "(mix.exclude) and empty, so it cannot be exported as it is stored; export "
            "it with --order trained"
        )
    rows = Split(packed.open_validation())
    if split == "train":
        order = None if seed is None else packed.order(seed)
        rows = Split(packed.open_training(), order)
    _check(packed, out, form, prefix, rows, shard_tokens)
    shards = plan(rows, form, prefix, shard_tokens)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=".export-", dir=out if is_local(out) else None
    ) as folder:
        scratch = rows.scratch(Path(folder))
        documents = 0
        checksums = dict[str, str]()
        for shard in shards:
            checksums |= _write(out, form, rows, shard)
            table = out / f"{shard.name}.docs.parquet"
            documents += write_documents(table, rows, scratch, shard.first, shard.stop)
            checksums[table.name] = sha256_file(table)
    dtype = _dtype(form, rows.dtype).name
    tokens = sum(shard.tokens for shard in shards)
    export: Export = {
        "format": form,
        "split": split,
        "order": "stored" if seed is None else "trained",
        "seed": seed,
        "rows": rows.rows,
        "sequence_length": rows.sequence_length,
        "tokens": tokens,
        "documents": documents,
        "dtype": dtype,
        "packing": packed.manifest.get("packing"),
        "padding_left_out": rows.rows * rows.sequence_length - tokens,
        "sources": packed.sources,
        "tokenizer": packed.manifest["tokenizer"],
        "packed_set": packed.fingerprint,
        "files": [shard.described() for shard in shards],
    }
    write_json(out / f"{prefix}.json", export)
    write_text(
        out / f"README.{form}.md", readme(form, packed.manifest["tokenizer"], dtype)
    )
    write_text(
        out / f"{prefix}.sha256",
        "".join(f"{digest}  {name}\n" for name, digest in sorted(checksums.items())),
    )
    return {**export, "sha256": checksums}


def plan(rows: Split, form: str, prefix: str, shard_tokens: int) -> list[ExportedFile]:
    """Assign rows to files in order: as many whole rows per file as `shard_tokens`
    hold.
    """
    shards: list[ExportedFile] = []
    first = position = tokens = 0

    def end_file() -> None:
        name = {
            "llmc": f"{prefix}_{len(shards):06d}",
            "olmo": f"{prefix}-{len(shards):05d}",
            "megatron": f"{prefix}_text_document",
        }.get(form, prefix)
        shards.append(ExportedFile(name, first, position, tokens))

    for block in rows.blocks():
        for filled in block.bounds.filled().tolist():
            if form in SHARDED and tokens + filled > shard_tokens:
                end_file()
                first, tokens = position, 0
            tokens += filled
            position += 1
    end_file()
    return shards


def _write(out: Path, form: str, rows: Split, shard: ExportedFile) -> dict[str, str]:
    """Write a shard's files; returns their checksums by name."""
    dtype = _dtype(form, rows.dtype)
    checksums = dict[str, str]()

    def opened(ending: str) -> AbstractContextManager[HashedSink]:
        return hashed_write(out / f"{shard.name}{ending}", checksums)

    def lengths() -> Iterator[np.ndarray]:
        return (block.lengths for block in rows.blocks(shard.first, shard.stop))

    with opened(".npy" if form == "olmo" else ".bin") as sink:
        if form == "llmc":
            sink.write(formats.llmc_header(shard.tokens, dtype))
        for block in rows.blocks(shard.first, shard.stop):
            tokens = np.ascontiguousarray(rows.tokens(block), dtype)
            sink.write(tokens.data.cast("B") if len(tokens) else b"")
    if form == "megatron":
        with opened(".idx") as sink:
            formats.write_megatron_index(sink, lengths, dtype)
    if form == "olmo":
        with opened(".csv.gz") as sink:
            formats.write_olmo_documents(sink, lengths())
    return checksums


def _dtype(form: str, dtype: np.dtype) -> np.dtype:
    if form != "megatron":
        return dtype
    return np.dtype("<u2") if dtype.itemsize == 2 else np.dtype("<i4")


def _check(
    packed: PackedSet, out: Path, form: str, prefix: str, rows: Split, shard_tokens: int
) -> None:
    if form not in FORMATS:
        raise ExportError(
            f"there is no format {form!r}; there are {', '.join(FORMATS)}"
        )
    if not rows.rows:
        raise ExportError(
            f"{packed.folder}: there are no rows of this split to export; raise "
            "mix.validation"
        )
    most = formats.MOST_LLMC_TOKENS
    if form == "llmc" and not rows.sequence_length <= shard_tokens <= most:
        raise ExportError(
            f"a file of llm.c holds at most {most} tokens and at "
            "least a row of "
            f"{rows.sequence_length}; {shard_tokens} per file are not possible"
        )
    for existing in sorted(out.iterdir()) if out.exists() else ():
        if existing.name.startswith(prefix):
            raise ExportError(
                f"{out} already holds {existing.name}; a trainer would read old "
                "files among new ones: choose "
                "another folder or remove what begins with the name of the split"
            )


SCHEMA = pa.schema(
    [
        ("start", pa.int64()),
        ("length", pa.int32()),
        ("row", pa.int64()),
        ("id", pa.binary(ID_BYTES)),
        ("source", pa.int32()),
        ("copy", pa.int32()),
        ("offset", pa.int64()),
    ]
)
"""`start` is the first token within the exported file, `row` the row of the packed set,
the rest as PIECES_SCHEMA.
"""


def write_documents(
    path: Path, split: Split, scratch: Scratch, first: int, stop: int
) -> int:
    """Write the table of the document pieces at positions [first, stop), in their
    order; returns how many there are.
    """
    at = written = 0
    with (
        atomic_write(path) as sink,
        pq.ParquetWriter(sink, SCHEMA, compression="zstd") as writer,
    ):
        for block in split.blocks(first, stop):
            pieces = scratch.of(block.rows)
            ends = at + np.cumsum(block.lengths)
            columns = {
                "start": ends - block.lengths,
                "length": block.lengths.astype(np.int32),
                "row": np.repeat(block.rows, block.counts),
                "id": word_ids(np.stack([pieces["high"], pieces["low"]], axis=1)),
            }
            for name in ("source", "copy", "offset"):
                columns[name] = np.ascontiguousarray(pieces[name])
            writer.write_table(pa.table(columns, schema=SCHEMA))
            at = int(ends[-1])
            written += len(pieces)
    return written
