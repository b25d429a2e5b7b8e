"""The packed set: rows of tokens on disk, and who they came from.

    packed.json                 what is in the set (below)
    train-00000.bin             rows of `sequence_length` tokens, raw little-endian uint16 (uint32: large vocabularies)
    train-00000.docs.parquet    one row per document piece of that shard: row (of the whole set), start, length, id,
                                source, copy, offset (within the document); an end-of-text counts to its document
    train-00000.ids.parquet     the rows of each document in that shard, by id, so that it is found without a search
    train-00000.sums            XXH64 of each row, so that one row can be checked (`row_bytes.py`)
    train-00000.cu              where the pieces of each row begin and end, for hot loops (`Boundaries`)
    val-<source>-00000.bin, .docs.parquet, .ids.parquet, .cu    held-out documents of one source; rows count from 0
    documents.parquet           every tokenised document by id: where it is, and why no row has it (LEDGER_SCHEMA); of
                                more than 67 million documents several tables, by the leading bits of the id

A training row holds text of one source only, and row r belongs to the source at place r of the merged order
(`order.unrank`), so the first n rows of the files are the mixture too. The rows of a set with phases lie phase after
phase, each in the merged order of its own: `train.stages` of packed.json has the rows of each source for every phase.
Of a set that continues another one (`continues`), the first phases are what was read of that one, in the order in which
it was: each is the beginning of the merged order of the rows that `train.begun` has of each source.

`train-00000.cu` says of every row what the table of pieces says, without the ids, for loops that read it by memory map:

    int64 (rows + 1,)    where each row's entries begin among the int32 that follow
    int32 (entries,)     of each row: the start of every piece (0 first), then the end of its last token

Both little-endian. What lies behind the last entry of a row is padding: it is known by its place, never by its id.
These are cumulative sequence lengths per row (`cu_seqlens`, as FlashAttention's varlen interface calls them).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.files import REPAIR, is_local, sha256_file

FORMAT = 4
"""Checksums of rows are XXH3; formats 1 to 3 had XXH64."""
FORMAT_WITH_PHASES = 5
"""Of a set with phases: a reader that knows no phases would take its rows for another mixture's."""
FORMAT_CONTINUED = 6
"""Of a set that continues another one: its first phases are read in the order in which they lie."""
READABLE_FORMATS = (FORMAT, FORMAT_WITH_PHASES, FORMAT_CONTINUED)
MANIFEST = "packed.json"
INDEX_GROUP_ROWS = 16_384
"""Larger than those of the other tables: an index is read for a few rows of it, and its groups are looked through."""
LARGEST_UINT16_VOCAB = 65_536
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
PIECES_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("start", pa.int32()),
        ("length", pa.int32()),
        ("id", pa.binary(ID_BYTES)),
        ("source", pa.int32()),
        ("copy", pa.int32()),
        ("offset", pa.int64()),
    ]
)
CHECKSUM_DTYPE = np.dtype("<u8")
"""Of the checksum of a row."""
NO_PIECES = pa.Table.from_batches([], PIECES_SCHEMA)
"""An empty table, made without Arrow's look at a list, for which it imports pandas."""
LEDGER = "documents.parquet"
LEDGERS = "ledgers"
"""Key of packed.json: how many tables the ledger has, a power of two, where it is more than one."""
LEDGER_SCHEMA = pa.schema(
    [
        ("id", pa.binary(ID_BYTES)),
        ("shard", pa.int32()),
        ("row", pa.int64()),
        ("source", pa.int32()),
        ("held_out", pa.bool_()),
        ("reason", pa.dictionary(pa.int8(), pa.string())),
    ]
)
"""`shard` and `row` say where the document is, `shard` counting ingest's sorted files, then those of `import_tokens`
(`importing/corpora.py`); `source` is the number in packed.json; `reason` is why no row holds it
(`mixing.ledger.RULES`), null where one does."""


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


def sums_name(file: str) -> str:
    """File name of the checksums beside a shard: uint64, little-endian, one for each row."""
    return f"{file.removesuffix('.bin')}.sums"


def ledger_name(number: int, tables: int) -> str:
    """File name of a table of the ledger: of several, number n has the ids whose leading bits are n."""
    return LEDGER if tables == 1 else f"documents-{number:05d}.parquet"


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


def _mapping(tokens: np.ndarray) -> mmap.mmap | None:
    """What maps the file that an array is the whole of."""
    held: Any = tokens
    while held is not None and not isinstance(held, mmap.mmap):
        held = held.obj if isinstance(held, memoryview) else getattr(held, "base", None)
    return held


def expect_far_reads(tokens: np.ndarray) -> None:
    """Let the system read single pages of a mapped file, where it would read 128 KiB around each."""
    mapping = _mapping(tokens)
    if mapping is not None and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)


def read_ahead(tokens: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> None:
    """Have the system read some parts of a mapped file side by side: one page after another, each waits for the disk.

    Args:
        tokens: the file, as `read_tokens` gives it; nothing happens where it is not mapped.
        firsts, lasts: integers of shape (n,), the parts [first, last).
    """
    mapping = _mapping(tokens)
    if mapping is None or not len(firsts) or not hasattr(mmap, "MADV_WILLNEED"):
        return
    begins = np.asarray(firsts, np.int64) * tokens.itemsize // mmap.PAGESIZE
    ends = -(-np.asarray(lasts, np.int64) * tokens.itemsize // mmap.PAGESIZE)
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    new = np.concatenate([[True], begins[1:] > ends[:-1]])
    for begin, end in zip(
        begins[new].tolist(), ends[np.append(np.flatnonzero(new)[1:] - 1, len(ends) - 1)].tolist(), strict=True
    ):
        mapping.madvise(mmap.MADV_WILLNEED, begin * mmap.PAGESIZE, max(end - begin, 1) * mmap.PAGESIZE)


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
            raise PackedSetError(
                f"{folder / name}: SHA-256 is {found}, but {MANIFEST} says {expected}; the file is "
                f"damaged: `{REPAIR}` and a run make it again"
            )


PADDING = -1
"""The position of a token that belongs to no document."""


@dataclass(frozen=True)
class Boundaries:
    """The pieces of some rows.

    Attributes:
        offsets: int64 of shape (n + 1,), where each row's entries begin in `bounds`.
        bounds: int32, of each row the starts of its pieces and then the end of the last one.
    """

    offsets: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def filled(self) -> np.ndarray:
        """Tokens of documents in each row (int64, shape (n,)); what is behind them is padding."""
        return self.bounds[self.offsets[1:] - 1].astype(np.int64)

    def of(self, rows: np.ndarray) -> Boundaries:
        """The boundaries of some of the rows, in the order asked for (int64, shape (n,))."""
        first = self.offsets[rows]
        counts = self.offsets[rows + 1] - first
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        index = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)
        return Boundaries(offsets, np.asarray(self.bounds[index]))

    def positions(self, sequence_length: int) -> np.ndarray:
        """Each token's number within its piece, from 0 (int32, shape (n, L)); PADDING behind the last piece."""
        from gristmill.tokenize.row_positions import fill_positions

        positions = np.empty((len(self), sequence_length), dtype=np.int32)
        fill_positions(self.offsets, self.bounds, positions)
        return positions


def whole_rows(rows: int, sequence_length: int) -> Boundaries:
    """The boundaries of rows that are one piece each."""
    bounds = np.tile(np.array([0, sequence_length], dtype=np.int32), rows)
    return Boundaries(np.arange(rows + 1, dtype=np.int64) * 2, bounds)


def boundaries_of(pieces: Mapping[str, np.ndarray], first: int, rows: int, sequence_length: int) -> Boundaries:
    """The boundaries of rows [first, first + rows), from their table of pieces.

    Args:
        pieces: `row`, `start`, `length`, ordered by row and start, gapless within a row. A row without any is
            taken for one piece of the whole row.
        first: number of the first row.
        rows: number of rows.
        sequence_length: tokens per row.
    """
    row = pieces["row"].astype(np.int64) - first
    counts = np.bincount(row, minlength=rows)
    offsets = np.concatenate([[0], np.cumsum(np.maximum(counts, 1) + 1)]).astype(np.int64)
    bounds = np.zeros(offsets[-1], dtype=np.int32)
    bounds[offsets[1:] - 1] = np.where(counts, 0, sequence_length)
    begins = np.cumsum(counts) - counts
    bounds[offsets[row] + np.arange(len(row)) - begins[row]] = pieces["start"]
    last = (begins + counts - 1)[counts > 0]
    bounds[(offsets[1:] - 1)[counts > 0]] = pieces["start"][last] + pieces["length"][last]
    return Boundaries(offsets, bounds)


def join(parts: list[Boundaries]) -> Boundaries:
    """The rows of several boundaries, one after the other."""
    sizes = np.concatenate([[np.int64(0)], *(np.diff(part.offsets) for part in parts)])
    empty = np.empty(0, dtype=np.int32)
    return Boundaries(np.cumsum(sizes), np.concatenate([empty, *(part.bounds for part in parts)]))


def to_bytes(boundaries: Boundaries) -> bytes:
    """The content of a file of boundaries."""
    return boundaries.offsets.astype("<i8").tobytes() + boundaries.bounds.astype("<i4").tobytes()


def read_boundaries(path: Path, rows: int) -> Boundaries:
    """A file of boundaries: memory-mapped where it is local, else read whole.

    Raises:
        ValueError: its size is not what its offsets say.
    """
    raw = (
        np.memmap(path, dtype=np.uint8, mode="r")
        if is_local(path) and path.stat().st_size
        else np.frombuffer(path.read_bytes(), dtype=np.uint8)
    )
    head = 8 * (rows + 1)
    offsets = raw[:head].view("<i8") if len(raw) >= head else np.zeros(1, dtype=np.int64)
    if len(offsets) != rows + 1 or len(raw) != head + 4 * int(offsets[-1]):
        raise ValueError(f"{path}: {len(raw)} bytes are not the boundaries of {rows} rows; run the mix stage again")
    return Boundaries(offsets, raw[head:].view("<i4"))
