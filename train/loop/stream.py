"""Which rows each step reads, and which process computes them: a pure function of (set, seed, step).

Batch b holds positions [b B, (b+1) B) of the keyed order, whatever the number of processes or micro-batches; those
only cut it. So the state of the stream is one integer, and a resumed training reads what it would have read.
"""

from __future__ import annotations

import hashlib

import numpy as np

from gristmill.tokenize.order import Order
from gristmill.tokenize.packed import PackedSet


def rows_in_step(order: Order, step: int, global_batch_size: int) -> np.ndarray:
    """The rows (int64, shape (B,)) of one optimizer step, counted from 0; epochs follow one another."""
    first = step * global_batch_size
    return order.rows(np.arange(first, first + global_batch_size, dtype=np.int64))


def rows_of_step(packed: PackedSet, seed: int, step: int, global_batch_size: int) -> np.ndarray:
    """The training rows of a packed set that one optimizer step reads; `step` counts from 0."""
    return rows_in_step(packed.order(seed), step, global_batch_size)


def micro_batches(rows: np.ndarray, rank: int, world_size: int, micro_batch_size: int) -> list[np.ndarray]:
    """One rank's share of a batch, cut into micro-batches.

    Rank r takes every world_size-th row from r on. All ranks get equally many micro-batches, since each of them is
    a collective operation; the last ones of a rank may be empty.

    Args:
        rows: (B,) the batch, the same on every rank.
        rank: 0 to world_size - 1.
        world_size: number of processes.
        micro_batch_size: most rows per forward pass.
    """
    share = rows[rank::world_size]
    count = -(-len(rows) // (world_size * micro_batch_size))
    return [share[start : start + micro_batch_size] for start in range(0, count * micro_batch_size, micro_batch_size)]


def extend_digest(digest: str, rows: np.ndarray) -> str:
    """The rolling hash of all that was read so far: two trainings with the same digest have read the same tokens.

    It begins with the fingerprint of what the rows are numbers of (for a packed set: its tokens' checksums), so that it
    speaks of content, not of numbers alone. Anybody who has the set and the seed can compute it anew.

    Args:
        digest: of the steps before; at the start the data's fingerprint.
        rows: the step's rows, in their order.

    Returns:
        32 hexadecimal digits.
    """
    content = digest.encode() + np.asarray(rows, dtype="<i8").tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
