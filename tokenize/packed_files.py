"""The packed set: rows of tokens on disk, and who they came from.

    packed.json                 what is in the set (below)
    train-00000.bin             rows of `sequence_length` tokens, raw little-endian uint16 (uint32: large vocabularies)
    train-00000.docs.parquet    one row per document piece of that shard: row (of the whole set), start, length, id,
                                source, copy, offset (within the document); an end-of-text counts to its document
    train-00000.ids.parquet     the rows of each document in that shard, by id, so that it is found without a search
    train-00000.sums            XXH64 of each row, so that one row can be checked (`streaming/checksums.py`)
    train-00000.cu              where the pieces of each row begin and end, for hot loops (`boundaries.py`)
    val-<source>-00000.bin, .docs.parquet, .ids.parquet, .cu    held-out documents of one source; rows count from 0
    documents.parquet           every tokenised document by id: where it is, and why no row has it (`mixing/ledger.py`)

A training row holds text of one source only, and row r belongs to the source at place r of the merged order
(`order.unrank`), so the first n rows of the files are the mixture too. The rows of a staged set lie stage after stage,
each in the merged order of its own: `train.stages` of packed.json has the rows of each source for every stage.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.files import REPAIR, is_local, sha256_file
from gristmill.tokenize.streaming.checksums import sums_name

FORMAT = 1
STAGED_FORMAT = 2
"""Of a staged set: a reader that knows no stages would take its rows for another mixture's."""
READABLE_FORMATS = (FORMAT, STAGED_FORMAT)
MANIFEST = "packed.json"
INDEX_GROUP_ROWS = 16_384
"""Larger than those of the other tables: an index is read for a few rows of it, and its groups are looked through."""
LARGEST_UINT16_VOCAB = 65_536
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
PIECES_SCHEMA = pa.schema([
    ("row", pa.int64()), ("start", pa.int32()), ("length", pa.int32()), ("id", pa.binary(ID_BYTES)),
    ("source", pa.int32()), ("copy", pa.int32()), ("offset", pa.int64()),
])
NO_PIECES = pa.Table.from_batches([], PIECES_SCHEMA)
"""An empty table, made without Arrow's look at a list, for which it imports pandas."""
LEDGER = "documents.parquet"
LEDGER_SCHEMA = pa.schema([
    ("id", pa.binary(ID_BYTES)), ("shard", pa.int32()), ("row", pa.int64()), ("source", pa.int32()),
    ("held_out", pa.bool_()), ("reason", pa.dictionary(pa.int8(), pa.string())),
])
"""`shard` and `row` say where ingest's document is, `shard` counting its sorted files; `source` is the number in
packed.json; `reason` is why no row holds it (`mixing.candidates.unused`), null where one does."""


class PackedSetError(RuntimeError):
    """A packed set is missing, incomplete, damaged, or was asked for what it does not hold."""


def dtype_name(vocab_size: int) -> str:
    """The smallest of uint16 and uint32 that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= LARGEST_UINT16_VOCAB else "uint32"


def train_name(shard: int) -> str:
    """File name of a training shard."""
    return f"train-{shard:05d}.bin"


def validation_name(source: str) -> str:
    """File name of a source's held-out rows; a slash or a blank in the name of the source is percent-encoded."""
    return f"val-{quote(source, safe='')}-00000.bin"


def pieces_name(file: str) -> str:
    """File name of the table of document pieces beside a shard."""
    return f"{file.removesuffix('.bin')}.docs.parquet"


def boundaries_name(file: str) -> str:
    """File name of the boundaries of document pieces beside a shard."""
    return f"{file.removesuffix('.bin')}.cu"


def ids_name(file: str) -> str:
    """File name of the index by document beside a shard."""
    return f"{file.removesuffix('.bin')}.ids.parquet"


def files_of(path: Path) -> list[Path]:
    """A shard's `.bin` file and what lies beside it."""
    return [path, *(path.with_name(name(path.name)) for name in (pieces_name, boundaries_name, ids_name, sums_name))]


def read_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file of raw tokens as a flat read-only array: memory-mapped where it is local, else read whole."""
    if not is_local(path):
        return np.frombuffer(path.read_bytes(), dtype=dtype)
    if not path.stat().st_size:
        return np.empty(0, dtype=dtype)
    with path.open("rb") as stream:  # not by `np.memmap`, which takes ten times as long to make
        return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def check_size(folder: Path, entry: Mapping[str, Any], row_bytes: int) -> None:
    """See that a shard is there and has the size of its rows.

    Raises:
        PackedSetError: it is not, or has another.
    """
    path, expected = folder / entry["file"], entry["rows"] * row_bytes
    found = path.stat().st_size if path.exists() else None
    if found != expected:
        state = "is missing" if found is None else f"has {found} bytes"
        raise PackedSetError(f"{path}: {state}, but {entry['rows']} rows take {expected}; run the mix stage again")


def check_content(folder: Path, checksums: Mapping[str, str]) -> None:
    """See that files (name -> SHA-256) hold what they held when they were written.

    Raises:
        PackedSetError: names the file that does not.
    """
    for name, expected in checksums.items():
        if (found := sha256_file(folder / name)) != expected:
            raise PackedSetError(f"{folder / name}: SHA-256 is {found}, but {MANIFEST} says {expected}; the file is "
                                 f"damaged: `{REPAIR}` and a run make it again")
