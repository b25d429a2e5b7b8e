"""Chance that belongs to the document: a draw is a hash of a key and the document's id, and of nothing else."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import ID_BYTES
from gristmill.tokenize.mixing.spread import order_of_spread
from gristmill.tokenize.order import mix_bits


def id_words(ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Document ids as numbers: uint64 of shape (n, 2), whose order is the order of the bytes."""
    column = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
    raw = np.frombuffer(column.buffers()[1], dtype=np.uint8) if len(column) else np.empty(0, dtype=np.uint8)
    start = column.offset * ID_BYTES
    words = raw[start : start + len(column) * ID_BYTES].view(">u8").reshape(-1, 2)
    return words.astype(np.uint64)


def word_ids(words: np.ndarray) -> pa.Array:
    """The inverse of `id_words`."""
    raw = pa.py_buffer(np.ascontiguousarray(words.astype(">u8")))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(ID_BYTES), len(words), [None, raw])


def draw(words: np.ndarray, key: int) -> np.ndarray:
    """One uniform uint64 per document.

    Args:
        words: (n, 2) from `id_words`.
        key: 64 bits from `order.order_key`; another key gives an independent draw.
    """
    return mix_bits(mix_bits(words[:, 0], np.uint64(key)) ^ words[:, 1], np.uint64(key))


def drawn_order(words: np.ndarray, key: int) -> np.ndarray:
    """The documents' numbers (int64) in the order of their draws; equal draws in the order of the ids."""
    return ordered_by(draw(words, key), words[:, 0], words[:, 1])


def ordered_by(first: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """The order (int64) by several columns of one length, the first counting most; equal rows as they come.

    The first column is a hash, which alone decides nearly always: only where it is equal the others are compared.
    """
    order, ordered = order_of_spread(first)
    equal = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(equal) and others:
        touched = np.union1d(equal, equal + 1)
        tied = order[touched]
        order[touched] = tied[np.lexsort((*(column[tied] for column in reversed(others)), ordered[touched]))]
    return order


def drawn_below(words: np.ndarray, key: int, share: float) -> np.ndarray:
    """Which documents (bool) draw below a share of the range; `share` in [0, 1)."""
    return draw(words, key) < np.uint64(int(share * 2**64))
