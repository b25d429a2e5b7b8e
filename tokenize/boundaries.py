"""Where documents begin and end within rows: a compact file beside each shard, which hot loops read by memory map.

`train-00000.cu` belongs to `train-00000.bin` and says of every row what the table of pieces says, without the ids:

    int64 (rows + 1,)    where each row's entries begin among the int32 that follow
    int32 (entries,)     of each row: the start of every piece (0 first), then the end of its last token

Both little-endian. What lies behind the last entry of a row is padding: it is known by its place, never by its id.
These are cumulative sequence lengths per row (`cu_seqlens`, as FlashAttention's varlen interface calls them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.dataprep.files import is_local
from gristmill.dataprep.kernels import kernel

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
    raw = np.memmap(path, dtype=np.uint8, mode="r") if is_local(path) and path.stat().st_size else \
        np.frombuffer(path.read_bytes(), dtype=np.uint8)
    head = 8 * (rows + 1)
    offsets = raw[:head].view("<i8") if len(raw) >= head else np.zeros(1, dtype=np.int64)
    if len(offsets) != rows + 1 or len(raw) != head + 4 * int(offsets[-1]):
        raise ValueError(f"{path}: {len(raw)} bytes are not the boundaries of {rows} rows; run the mix stage again")
    return Boundaries(offsets, raw[head:].view("<i4"))


@kernel
def fill_positions(offsets: np.ndarray, bounds: np.ndarray, positions: np.ndarray) -> None:
    """Write every token's number within its piece, and PADDING behind the last (see `Boundaries.positions`)."""
    for row in range(len(offsets) - 1):
        last = offsets[row + 1] - 1
        for entry in range(offsets[row], last):
            start = bounds[entry]
            for at in range(start, bounds[entry + 1]):
                positions[row, at] = at - start
        for at in range(bounds[last], positions.shape[1]):
            positions[row, at] = -1
