"""Writing shards of a packed set with what lies beside them, and whole small sets from memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import write_table
from gristmill.dataprep.files import atomic_write, sha256_file, write_json
from gristmill.tokenize.boundaries import boundaries_of, to_bytes
from gristmill.tokenize.mixing.draws import id_words, ordered_by, word_ids
from gristmill.tokenize.packed_files import (
    DTYPES,
    FORMAT,
    INDEX_GROUP_ROWS,
    MANIFEST,
    PIECES_SCHEMA,
    PackedSetError,
    dtype_name,
    files_of,
    train_name,
    validation_name,
)
from gristmill.tokenize.streaming.checksums import row_checksums


def write_rows(path: Path, tokens: np.ndarray, pieces: pa.Table, first: int = 0) -> dict[str, Any]:
    """Write a shard, its table of pieces, their boundaries and index by document, and a checksum of every row.

    Args:
        path: the `.bin` file.
        tokens: (rows, sequence_length) in the set's dtype.
        pieces: PIECES_SCHEMA, ordered by row and start; a row without any counts as one piece.
        first: number of the shard's first row.

    Returns:
        its entry in packed.json: file, rows, sha256, and the sha256 of the files beside it.
    """
    pieces = pieces.cast(PIECES_SCHEMA)
    _, table, boundaries, index, sums = files_of(path)
    content = np.ascontiguousarray(tokens).data.cast("B") if tokens.size else b""
    with ThreadPoolExecutor(1, "tokens") as pool:  # neither needs the interpreter for longer than moments
        checksum = pool.submit(_write_tokens, path, content)
        write_table(table, pieces, INDEX_GROUP_ROWS, repeating=("source", "copy"))
        write_table(index, index_of(pieces), INDEX_GROUP_ROWS, repeating=())
        columns = {name: pieces[name].to_numpy() for name in ("row", "start", "length")}
        with atomic_write(boundaries) as sink:
            sink.write(to_bytes(boundaries_of(columns, first, *tokens.shape)))
        with atomic_write(sums) as sink:
            sink.write(row_checksums(tokens).data.cast("B") if len(tokens) else b"")
        return {"file": path.name, "rows": len(tokens), "sha256": checksum.result(),
                "beside": {beside.name: sha256_file(beside) for beside in (table, boundaries, index, sums)}}


def _write_tokens(path: Path, content: memoryview | bytes) -> str:
    """Write a shard's tokens; returns their SHA-256."""
    with atomic_write(path) as sink:
        sink.write(content)
    # Of what is in memory: reading it again would take as long as mixing it does.
    return hashlib.sha256(content).hexdigest()


def index_of(pieces: pa.Table) -> pa.Table:
    """Each document's rows (`id`, `row`, once each), ordered by id, from a table of pieces."""
    words, row = id_words(pieces["id"]), pieces["row"].to_numpy()
    order = ordered_by(words[:, 0], words[:, 1], row)
    words, row = words[order], row[order]
    same = (words[1:, 0] == words[:-1, 0]) & (words[1:, 1] == words[:-1, 1]) & (row[1:] == row[:-1])
    new = np.concatenate([[True], ~same])[: len(row)]
    return pa.table([word_ids(words[new]), row[new]], ["id", "row"])


def write_packed_set(
    folder: Path,
    rows: np.ndarray,
    rows_per_source: Mapping[str, int],
    tokenizer: Mapping[str, Any],
    validation: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a whole packed set from memory, one shard, with no document pieces.

    Args:
        folder: where to.
        rows: (R, L) tokens; row r is of the source at place r of the merged order.
        rows_per_source: source -> rows, R together.
        tokenizer: vocab_size, eos, pad, sha256.
        validation: source -> (n, L) tokens.

    Raises:
        PackedSetError: the counts do not sum to R, or a token is outside the vocabulary.
    """
    name = dtype_name(tokenizer["vocab_size"])
    checked = {source: np.asarray(part) for source, part in (validation or {}).items()}
    if sum(rows_per_source.values()) != len(rows):
        raise PackedSetError(f"{folder}: {len(rows)} rows, but {dict(rows_per_source)} per source")
    for part in (rows, *checked.values()):
        if part.size and not 0 <= part.min() <= part.max() < tokenizer["vocab_size"]:
            raise PackedSetError(f"{folder}: tokens {part.min()} to {part.max()} in a vocabulary of "
                                 f"{tokenizer['vocab_size']}")
    none = PIECES_SCHEMA.empty_table()
    shard = write_rows(folder / train_name(0), np.asarray(rows).astype(DTYPES[name]), none)
    held_out = {source: write_rows(folder / validation_name(source), part.astype(DTYPES[name]), none)
                for source, part in checked.items()}
    write_json(folder / MANIFEST, {
        "format": FORMAT, "dtype": name, "sequence_length": rows.shape[1], "sources": list(rows_per_source),
        "tokenizer": dict(tokenizer), "validation": held_out,
        "train": {"rows": len(rows), "rows_per_source": list(rows_per_source.values()), "shards": [shard]},
    })
