"""Files of a packed set: rows of tokens, and the origins of their documents.

    packed.json               contents of the set (below)
    train-00000.bin           rows of `sequence_length` tokens, raw little-endian uint16
                              (uint32: large vocabularies)
    train-00000.docs.parquet  one row per document piece of that shard: row (of the whole
                              set), start, length, id, source, copy, offset (within the
                              document); an end-of-text counts to its document
    train-00000.ids.parquet   the rows of each document in that shard, by id, for lookups
                              without a search
    train-00000.sums          checksum of each row, to check single rows (`row_bytes.py`)
    train-00000.cu            boundaries of the pieces of each row, for hot loops
                              (`Boundaries`)
    val-<source>-00000.bin, .docs.parquet, .ids.parquet, .cu
                              held-out documents of one source; rows count from 0
    documents.parquet         every tokenised document by id: its location, and why no row
                              has it (LEDGER_SCHEMA); above 67 million documents several
                              tables, by the leading bits of the id

A training row holds text of one source only, and row r belongs to the source at place r
of the merged order (`shuffle.sources_of_rows`), so every prefix of the files holds the
mixture. A set with phases stores its rows phase after phase, each in its own merged
order: `train.stages` of packed.json has the rows of each source for every phase.

`train-00000.cu` holds the boundaries of the table of pieces, without ids, for loops
that read it by memory map:

    int64 (rows + 1,)  first entry of each row among the int32 that follow
    int32 (entries,)   of each row: the start of every piece (0 first), then the end of
                       its last token

Both little-endian. Tokens after the last entry of a row are padding, identified by
position, never by id. These are cumulative sequence lengths per row (`cu_seqlens`, as
FlashAttention's varlen interface calls them).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import offsets_of
from gristmill.core.files import REPAIR, is_local, sha256_file
from gristmill.dataprep.documents import ID_BYTES

FORMAT = 4
"""Checksums of rows are XXH3; formats 1 to 3 had XXH64."""
FORMAT_WITH_PHASES = 5
"""Format of sets with phases: readers without phases would misread the mixture of their
rows.
"""
READABLE_FORMATS = (FORMAT, FORMAT_WITH_PHASES)
MANIFEST = "packed.json"
INDEX_GROUP_ROWS = 16_384
"""Larger than in other tables: lookups read a few rows and search through the
groups.
"""
LARGEST_UINT16_VOCAB = 65_536
DTYPES: dict[str, np.dtype] = {
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}
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
"""Type of a row's checksum."""
LEDGER = "documents.parquet"
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
"""`shard` and `row` locate the document, `shard` counting ingest's sorted files, then
those of `import_tokens` (`importing/import_tokens.py`); `source` is the number in
packed.json; `reason` explains why no row holds it (`mixing.ledger.RULES`), null if one
does.
"""


class ShardEntry(TypedDict):
    """A shard in packed.json."""

    file: str
    rows: int
    sha256: str
    beside: dict[str, str]
    """Name of each file beside it -> its SHA-256."""
    withheld: NotRequired[list[int]]
    """Rows that were emptied, by their numbers in the set."""
    whole_sha256: NotRequired[str]
    """SHA-256 before any row was emptied."""


class TokenizerEntry(TypedDict):
    """A set's tokenizer in packed.json."""

    vocab_size: int
    eos: int
    pad: int
    sha256: NotRequired[str]
    """SHA-256 of tokenizer.json."""


class TrainEntry(TypedDict):
    """The training rows in packed.json."""

    rows: int
    rows_per_source: list[int]
    stages: NotRequired[list[list[int]]]
    """Rows of each source, by phase."""
    shards: list[ShardEntry]


class PackedManifest(TypedDict):
    """packed.json, as far as rows need it: mixtures add their shares and costs
    (`mixing/mix_summary.py`).
    """

    format: int
    dtype: str
    sequence_length: int
    sources: list[str]
    tokenizer: TokenizerEntry
    train: TrainEntry
    validation: dict[str, ShardEntry]
    ledgers: NotRequired[int]
    """Number of the ledger's tables, a power of two, if more than one."""
    packing: NotRequired[str]


class PackedSetError(RuntimeError):
    """A packed set that is missing, incomplete or damaged, or a request for rows that
    it does not hold.
    """


def dtype_name(vocab_size: int) -> str:
    """Smaller of uint16 and uint32 that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= LARGEST_UINT16_VOCAB else "uint32"


def train_name(shard: int) -> str:
    """File name of a training shard."""
    return f"train-{shard:05d}.bin"


def validation_name(source: str) -> str:
    """File name of a source's held-out rows; a slash or a blank in the name of the
    source is percent-encoded.
    """
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
    """File name of the checksums beside a shard: uint64, little-endian, one for each
    row.
    """
    return f"{file.removesuffix('.bin')}.sums"


def ledger_name(number: int, tables: int) -> str:
    """File name of a table of the ledger: of several, table n holds the ids whose
    leading bits are n.
    """
    return LEDGER if tables == 1 else f"documents-{number:05d}.parquet"


def files_of(path: Path) -> list[Path]:
    """A shard's `.bin` file and the files beside it."""
    names = (pieces_name, boundaries_name, ids_name, sums_name)
    return [path, *(path.with_name(name(path.name)) for name in names)]


def read_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """Read a file of raw tokens as a flat read-only array: memory-mapped if local,
    otherwise read completely.
    """
    if not is_local(path):
        return np.frombuffer(path.read_bytes(), dtype)
    if not path.stat().st_size:
        return np.empty(0, dtype)
    with path.open("rb") as stream:  # `np.memmap` takes ten times as long to create
        return np.frombuffer(
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype
        )


def _mapping(tokens: np.ndarray) -> mmap.mmap | None:
    """Memory map that backs an array, if any."""
    owner: Any = tokens
    while owner is not None and not isinstance(owner, mmap.mmap):
        name = "obj" if isinstance(owner, memoryview) else "base"
        owner = getattr(owner, name, None)
    return owner


def expect_far_reads(tokens: np.ndarray) -> None:
    """Disable the kernel's readahead on a mapped file, which reads 128 KiB around each
    page.
    """
    mapping = _mapping(tokens)
    if mapping is not None and hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)


def read_ahead(tokens: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> None:
    """Prefetch parts of a mapped file in parallel: sequential page faults would each
    wait for the disk.

    Args:
        tokens: the file, from `read_tokens`; no effect unless mapped.
        firsts, lasts: integers of shape (n,), the parts [first, last).
    """
    mapping = _mapping(tokens)
    if mapping is None or not len(firsts) or not hasattr(mmap, "MADV_WILLNEED"):
        return
    begins = np.asarray(firsts, np.int64) * tokens.itemsize // mmap.PAGESIZE
    ends = -(-np.asarray(lasts, np.int64) * tokens.itemsize // mmap.PAGESIZE)
    order = np.argsort(begins, kind="stable")
    begins = begins[order]
    ends = np.maximum.accumulate(ends[order])
    new = np.concatenate([[True], begins[1:] > ends[:-1]])
    for begin, end in zip(
        begins[new].tolist(),
        ends[np.append(np.flatnonzero(new)[1:] - 1, len(ends) - 1)].tolist(),
        strict=True,
    ):
        mapping.madvise(
            mmap.MADV_WILLNEED,
            begin * mmap.PAGESIZE,
            max(end - begin, 1) * mmap.PAGESIZE,
        )


def check_size(path: Path, rows: int, row_bytes: int) -> None:
    """Check that a file of a set exists and has the size of its rows.

    Raises:
        PackedSetError: it does not.
    """
    size = path.stat().st_size if path.exists() else None
    if size != rows * row_bytes:
        state = "is missing" if size is None else f"has {size} bytes"
        raise PackedSetError(
            f"{path}: {state}, but {rows} rows take {rows * row_bytes}; run the stage "
            "again that made the set"
        )


def check_content(folder: Path, checksums: Mapping[str, str]) -> None:
    """Check files against their checksums (name -> SHA-256).

    Raises:
        PackedSetError: names the file that differs.
    """
    for name, expected in checksums.items():
        if (digest := sha256_file(folder / name)) != expected:
            raise PackedSetError(
                f"{folder / name}: SHA-256 is {digest}, but {MANIFEST} says "
                f"{expected}; the file is damaged: `{REPAIR}` and a run make it again"
            )


PADDING = -1
"""Position of a token that belongs to no document."""


@dataclass(frozen=True)
class Boundaries:
    """Boundaries of the document pieces of some rows.

    Attributes:
        offsets: int64 of shape (n + 1,), first entry of each row in `bounds`.
        bounds: int32, for each row the starts of its pieces, then the end of the last
            one.
    """

    offsets: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def to_bytes(self) -> bytes:
        """Content of a boundary file."""
        return (
            self.offsets.astype("<i8").tobytes() + self.bounds.astype("<i4").tobytes()
        )

    def filled(self) -> np.ndarray:
        """Document tokens in each row (int64, shape (n,)); padding follows them."""
        return self.bounds[self.offsets[1:] - 1].astype(np.int64)

    def of(self, rows: np.ndarray) -> Boundaries:
        """Boundaries of some of the rows, in the requested order (int64, shape
        (n,)).
        """
        first = self.offsets[rows]
        counts = self.offsets[rows + 1] - first
        offsets = offsets_of(counts)
        index = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)
        return Boundaries(offsets, np.asarray(self.bounds[index]))

    def positions(self, sequence_length: int) -> np.ndarray:
        """Position of each token within its piece, from 0 (int32, shape (n, L));
        PADDING after the last piece.
        """
        from gristmill.tokenize.row_positions import fill_positions

        positions = np.empty((len(self), sequence_length), np.int32)
        fill_positions(self.offsets, self.bounds, positions)
        return positions


def boundaries_of(
    pieces: Mapping[str, np.ndarray], first: int, rows: int, sequence_length: int
) -> Boundaries:
    """Boundaries of rows [first, first + rows), from their table of pieces.

    Args:
        pieces: `row`, `start`, `length`, ordered by row and start, gapless within a
            row. A row without any counts as one piece.
        first: number of the first row.
        rows: number of rows.
        sequence_length: tokens per row.
    """
    row = pieces["row"].astype(np.int64) - first
    counts = np.bincount(row, minlength=rows)
    offsets = offsets_of(np.maximum(counts, 1) + 1)
    bounds = np.zeros(offsets[-1], np.int32)
    bounds[offsets[1:] - 1] = np.where(counts, 0, sequence_length)
    begins = np.cumsum(counts) - counts
    bounds[offsets[row] + np.arange(len(row)) - begins[row]] = pieces["start"]
    last = (begins + counts - 1)[counts > 0]
    bounds[(offsets[1:] - 1)[counts > 0]] = (
        pieces["start"][last] + pieces["length"][last]
    )
    return Boundaries(offsets, bounds)


def by_shard(
    rows: np.ndarray, ends: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Shards of some rows, ascending, each with the numbers of the rows in it and their
    places among the requested ones.

    Args:
        rows: int64 (k,), in [0, R).
        ends: int64 (shards,), ascending: the first row after each shard.
    """
    shards = np.searchsorted(ends, rows, side="right")
    order = np.argsort(shards, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1):
        if len(places):
            shard = int(shards[places[0]])
            yield shard, rows[places] - (ends[shard - 1] if shard else 0), places


def gather_boundaries(
    shards: Sequence[Callable[[], Boundaries]], ends: np.ndarray, rows: np.ndarray
) -> Boundaries:
    """Boundaries of rows of several shards, in the requested order.

    Args:
        shards: give the boundaries of each.
        ends: int64 of shape (shards,), end of each in rows.
        rows: int64 of shape (n,), counted through all shards.
    """
    parts = []
    order = [np.empty(0, np.int64)]
    for shard, within, places in by_shard(rows, ends):
        parts.append(shards[shard]().of(within))
        order.append(places)
    if len(parts) == 1:
        return parts[0]
    sizes = [np.empty(0, np.int64), *(np.diff(part.offsets) for part in parts)]
    bounds = [np.empty(0, np.int32), *(part.bounds for part in parts)]
    joined = Boundaries(offsets_of(np.concatenate(sizes)), np.concatenate(bounds))
    return joined.of(np.argsort(np.concatenate(order)))


def read_boundaries(path: Path, rows: int) -> Boundaries:
    """Read a boundary file: memory-mapped if local, otherwise read completely.

    Raises:
        ValueError: its size does not match its offsets.
    """
    raw = read_tokens(path, np.dtype(np.uint8))
    head = 8 * (rows + 1)
    offsets = raw[:head].view("<i8") if len(raw) >= head else np.zeros(1, np.int64)
    if len(offsets) != rows + 1 or len(raw) != head + 4 * int(offsets[-1]):
        raise ValueError(
            f"{path}: {len(raw)} bytes are not the boundaries of {rows} rows; run "
            "the mix stage again"
        )
    return Boundaries(offsets, raw[head:].view("<i4"))
