"""Packed sets written from memory, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import write_json
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import (
    DTYPES,
    FORMAT,
    MANIFEST,
    PIECES_SCHEMA,
    PackedManifest,
    PackedSetError,
    TokenizerEntry,
    check_content,
    check_size,
    dtype_name,
    train_name,
    validation_name,
)
from gristmill.tokenize.packed_writing import write_rows


def write_packed_set(
    folder: Path,
    rows: np.ndarray,
    rows_per_source: Mapping[str, int],
    tokenizer: TokenizerEntry,
    validation: Mapping[str, np.ndarray] | None = None,
    pieces: pa.Table | None = None,
    shard_rows: int | None = None,
    validation_pieces: Mapping[str, pa.Table] | None = None,
) -> None:
    """Write a whole packed set from memory.

    Args:
        folder: of the set.
        rows: (R, L) tokens; row r is of the source at place r of the merged order.
        rows_per_source: source -> rows, R together.
        tokenizer: of the tokens.
        validation: source -> (n, L) tokens.
        pieces: PIECES_SCHEMA, of the training rows; none by default.
        shard_rows: rows per shard; all by default.
        validation_pieces: source -> pieces of its validation rows; none by default.

    Raises:
        PackedSetError: the counts do not sum to R, or a token is outside the
            vocabulary.
    """
    name = dtype_name(tokenizer["vocab_size"])
    checked = {source: np.asarray(part) for source, part in (validation or {}).items()}
    if sum(rows_per_source.values()) != len(rows):
        raise PackedSetError(
            f"{folder}: {len(rows)} rows, but {dict(rows_per_source)} per source"
        )
    for part in (rows, *checked.values()):
        if part.size and not 0 <= part.min() <= part.max() < tokenizer["vocab_size"]:
            raise PackedSetError(
                f"{folder}: tokens {part.min()} to {part.max()} in a vocabulary of "
                f"{tokenizer['vocab_size']}"
            )
    no_pieces = PIECES_SCHEMA.empty_table()
    row = pc.field("row")
    step = shard_rows or max(len(rows), 1)
    shards = [
        write_rows(
            folder / train_name(number),
            rows[first : first + step].astype(DTYPES[name]),
            (pieces or no_pieces).filter((row >= first) & (row < first + step)),
            first,
        )
        for number, first in enumerate(range(0, max(len(rows), 1), step))
    ]
    held_out = {
        source: write_rows(
            folder / validation_name(source),
            part.astype(DTYPES[name]),
            (validation_pieces or {}).get(source, no_pieces),
        )
        for source, part in checked.items()
    }
    manifest: PackedManifest = {
        "format": FORMAT,
        "dtype": name,
        "sequence_length": rows.shape[1],
        "sources": list(rows_per_source),
        "tokenizer": tokenizer,
        "validation": held_out,
        "train": {
            "rows": len(rows),
            "rows_per_source": list(rows_per_source.values()),
            "shards": shards,
        },
    }
    write_json(folder / MANIFEST, manifest)


def piece_table(**columns: Sequence[object] | np.ndarray) -> pa.Table:
    """Table of pieces from its columns; `source`, `copy` and `offset` are 0 if they are
    missing.
    """
    zeros = [0] * len(columns["row"])
    return pa.table(
        {name: columns.get(name, zeros) for name in PIECES_SCHEMA.names}, PIECES_SCHEMA
    )


def tokens_of(tokens: np.ndarray, piece: Mapping[str, Any]) -> list[int]:
    """Tokens of a piece, from those of all rows."""
    start: int = piece["start"]
    return tokens[piece["row"], start : start + piece["length"]].tolist()


def part_of(document: Sequence[int], piece: Mapping[str, Any]) -> Sequence[int]:
    """Part of a document that a piece holds."""
    offset: int = piece["offset"]
    return document[offset : offset + piece["length"]]


def verify(packed: PackedSet, deep: bool = False) -> None:
    """Check that all files exist with their sizes, and with `deep` their checksums.

    Raises:
        PackedSetError: names the file that differs.
    """
    row_bytes = packed.sequence_length * packed.dtype.itemsize
    for shard in (*packed.shards, *packed.manifest["validation"].values()):
        check_size(packed.folder / shard["file"], shard["rows"], row_bytes)
        if deep:
            check_content(
                packed.folder, {shard["file"]: shard["sha256"], **shard["beside"]}
            )
