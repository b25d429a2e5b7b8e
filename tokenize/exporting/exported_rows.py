"""Rows of a packed set in export order, block by block, without padding.

Memory is bounded: shards are memory-mapped, and the fields of pieces (32 bytes each)
are in a scratch file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gristmill.core.files import reserve
from gristmill.dataprep.shuffle_format import ranges
from gristmill.tokenize.document_sampling import id_words
from gristmill.tokenize.packed import OpenShard
from gristmill.tokenize.packed_files import (
    Boundaries,
    PackedSetError,
    by_shard,
    gather_boundaries,
)
from gristmill.tokenize.shuffle import Order

BLOCK_TOKENS = 1 << 21
PIECE = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("source", "<i4"),
        ("copy", "<i4"),
        ("offset", "<i8"),
    ]
)
"""Fields of a piece: its document's id as two words, and the columns of PIECES_SCHEMA
except its place.
"""


@dataclass(frozen=True)
class Block:
    """Consecutive rows.

    Attributes:
        rows: int64 of shape (rows,), their numbers in the packed set.
        bounds: boundaries of their document pieces.
        lengths: int64 of shape (pieces,), tokens of each document piece.
        counts: int64 of shape (rows,), pieces of each row.
    """

    rows: np.ndarray
    bounds: Boundaries
    lengths: np.ndarray
    counts: np.ndarray


class Split:
    """The rows of one side of a packed set, in an order.

    Args:
        shards: of the rows, in order.
        order: the order to read them in; as they are stored if absent.

    Attributes:
        rows: their number.
        dtype: of the tokens.
        sequence_length: of the rows.
    """

    def __init__(self, shards: Sequence[OpenShard], order: Order | None = None) -> None:
        self._shards = list(shards)
        self._order = order
        self._ends = np.cumsum([len(shard.tokens) for shard in shards], dtype=np.int64)
        stored = int(self._ends[-1]) if len(self._ends) else 0
        self.rows = stored if order is None else order.total
        self.dtype = shards[0].tokens.dtype if shards else np.dtype("<u2")
        self.sequence_length = shards[0].tokens.shape[1] if shards else 1

    def blocks(self, first: int = 0, stop: int | None = None) -> Iterator[Block]:
        """Rows at positions [first, stop) of the order, in blocks."""
        step = max(1, BLOCK_TOKENS // self.sequence_length)
        end = self.rows if stop is None else stop
        readers = [partial(getattr, shard, "boundaries") for shard in self._shards]
        for begin in range(first, end, step):
            rows = np.arange(begin, min(end, begin + step), dtype=np.int64)
            if self._order is not None:
                rows = self._order.rows(rows)
            bounds = gather_boundaries(readers, self._ends, rows)
            differences = np.diff(bounds.bounds.astype(np.int64))
            inner = np.ones(len(differences), bool)
            inner[bounds.offsets[1:-1] - 1] = False
            yield Block(rows, bounds, differences[inner], np.diff(bounds.offsets) - 1)

    def tokens(self, block: Block) -> np.ndarray:
        """Tokens of the documents of a block, flat, in the set's dtype, without
        padding.
        """
        tokens = np.empty((len(block.rows), self.sequence_length), self.dtype)
        for shard, rows, places in by_shard(block.rows, self._ends):
            tokens[places] = self._shards[shard].tokens[rows]
        filled = block.bounds.filled()
        if (filled == self.sequence_length).all():
            return tokens.reshape(-1)
        return tokens[np.arange(self.sequence_length) < filled[:, None]]

    def scratch(self, folder: Path) -> Scratch:
        """Write the fields of every piece to a local folder, for lookups by row."""
        total = sum(
            len(shard.boundaries.bounds) - len(shard.boundaries)
            for shard in self._shards
        )
        first = np.memmap(folder / "first", np.int64, mode="w+", shape=(self.rows + 1,))
        pieces = np.memmap(folder / "pieces", PIECE, mode="w+", shape=(total,))
        for name in ("first", "pieces"):
            reserve(folder / name)
        at = row = 0
        for shard in self._shards:
            table = shard.pieces()
            offsets = shard.boundaries.offsets
            # A row has one boundary more than it has pieces.
            first[row : row + len(offsets)] = at + offsets - np.arange(len(offsets))
            row += len(offsets) - 1
            if len(table) != first[row] - at:
                raise PackedSetError(
                    f"{shard.name}: its table has {len(table)} document pieces, but "
                    f"its rows have {first[row] - at}; run the mix stage again"
                )
            part = pieces[at : at + len(table)]
            part["high"], part["low"] = id_words(table["id"]).T
            for name in ("source", "copy", "offset"):
                part[name] = table[name].to_numpy()
            at += len(table)
        return Scratch(first, pieces)


@dataclass(frozen=True)
class Scratch:
    """Fields of all pieces, on disk.

    Attributes:
        first: int64 of shape (rows + 1,), first piece of each row.
        pieces: PIECE of shape (pieces,).
    """

    first: np.ndarray
    pieces: np.ndarray

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Pieces (PIECE) of rows, in the requested order."""
        begins, ends = np.asarray(self.first[[rows, rows + 1]])
        return np.asarray(self.pieces[ranges(begins, ends)])
