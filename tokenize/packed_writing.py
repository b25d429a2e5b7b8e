"""Writers of the shards of a packed set with the files beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.core.files import atomic_write, sha256_file, write_bytes
from gristmill.dataprep.documents import write_table
from gristmill.dataprep.shuffle_format import columns_of, group_starts
from gristmill.tokenize.document_sampling import id_words, ordered_by, word_ids
from gristmill.tokenize.packed_files import (
    INDEX_GROUP_ROWS,
    PIECES_SCHEMA,
    ShardEntry,
    boundaries_of,
    files_of,
)
from gristmill.tokenize.row_bytes import row_checksums


def write_rows(
    path: Path, tokens: np.ndarray, pieces: pa.Table, first: int = 0
) -> ShardEntry:
    """Write a shard from in-memory tokens (rows, sequence_length) (see
    `write_blocks`).
    """
    return write_blocks(path, (tokens,), pieces, first)


def write_blocks(
    path: Path, blocks: Iterable[np.ndarray], pieces: pa.Table, first: int
) -> ShardEntry:
    """Write a shard, its table of pieces, their boundaries and index by document, and a
    checksum of every row.

    Args:
        path: the `.bin` file.
        blocks: its tokens, (n, sequence_length) in the set's dtype at a time, each
            valid until the next; at least one, which may have no rows. Consumed in
            another thread.
        pieces: PIECES_SCHEMA, ordered by row and start; a row without any counts as one
            piece.
        first: number of the shard's first row.

    Returns:
        its entry in packed.json.
    """
    pieces = pieces.cast(PIECES_SCHEMA)
    _, table, boundaries, index, sums = files_of(path)
    # both release the GIL for most of their time
    with ThreadPoolExecutor(1, "tokens") as pool:
        writing = pool.submit(_write_tokens, path, blocks)
        write_table(table, pieces, INDEX_GROUP_ROWS, repeating=("source", "copy"))
        write_table(index, index_of(pieces), INDEX_GROUP_ROWS, repeating=())
        written = writing.result()
    shard_boundaries = boundaries_of(
        columns_of(pieces.select(["row", "start", "length"])),
        first,
        len(written.checksums),
        written.sequence_length,
    )
    write_bytes(boundaries, shard_boundaries.to_bytes())
    write_bytes(sums, written.checksums.tobytes())
    return {
        "file": path.name,
        "rows": len(written.checksums),
        "sha256": written.sha256,
        "beside": {
            beside.name: sha256_file(beside)
            for beside in (table, boundaries, index, sums)
        },
    }


class _Written(NamedTuple):
    """Shape, digest and row checksums of a written token file."""

    sequence_length: int
    sha256: str
    checksums: np.ndarray


def _write_tokens(path: Path, blocks: Iterable[np.ndarray]) -> _Written:
    """Write a shard's tokens; each block is hashed while in the cache."""
    digest = hashlib.sha256()
    checksums = []
    length = 0
    with atomic_write(path) as sink:
        for block in blocks:
            rows = np.ascontiguousarray(block)
            length = rows.shape[1]
            checksums.append(row_checksums(rows))
            if rows.size:
                digest.update(rows.data.cast("B"))
                sink.write(rows.data.cast("B"))
    return _Written(length, digest.hexdigest(), np.concatenate(checksums))


def index_of(pieces: pa.Table) -> pa.Table:
    """Rows of each document (`id`, `row`, distinct), ordered by id, from a table of
    pieces.
    """
    words = id_words(pieces["id"])
    row = pieces["row"].to_numpy()
    order = ordered_by(words[:, 0], words[:, 1], row)
    words, row = words.take(order, axis=0), row[order]
    new = group_starts(words[:, 0], words[:, 1], row)
    return pa.table([word_ids(words.take(new, axis=0)), row[new]], ["id", "row"])
