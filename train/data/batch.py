"""Training rows: tokens, their loss mask, and positions within documents.

Positions are negative in the padding.
"""

from __future__ import annotations

import numpy as np

from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import padded_length


def filled_tokens(packed: PackedSet, rows: np.ndarray, cuts: int = 1) -> np.ndarray:
    """Tokens of documents in each row, after splitting it into `cuts` shorter rows
    (int64, shape (n cuts,)).
    """
    length = packed.sequence_length // cuts
    filled = packed.boundaries(rows).filled()[:, None] - np.arange(cuts) * length
    return np.clip(filled, 0, length).ravel()


def predicted_tokens(packed: PackedSet, rows: np.ndarray, cuts: int = 1) -> int:
    """Tokens with a loss in rows of a mixture: all but padding, and the first of each
    row.
    """
    return int(np.maximum(filled_tokens(packed, rows, cuts) - 1, 0).sum())


def document_positions(
    packed: PackedSet, rows: np.ndarray, cuts: int = 1
) -> np.ndarray:
    """Position of each token within its document (int32, shape (n cuts, L / cuts)),
    negative in the padding.

    A split document starts over with its row.
    """
    length = packed.sequence_length // cuts
    return np.minimum(
        packed.positions(rows).reshape(-1, length), np.arange(length, dtype=np.int32)
    )


def filled_positions(filled: np.ndarray, length: int) -> np.ndarray:
    """Position of each token within its row (int32, shape (n, length)), negative in the
    padding after `filled` (n,).
    """
    places = np.arange(length, dtype=np.int32)
    return np.where(places < filled[:, None], places, np.int32(-1))


def read_turns(
    packed: PackedSet, masks: LossMasks, rows: np.ndarray, trim: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Rows of examples: ids (n, t) int64; (n, t) bool, True for tokens predicted from
    those before them, never the first of a row; and (n, t) int32 positions within
    examples, None if every row holds one.

    Args:
        packed: the set.
        masks: its loss masks.
        rows: int64 of shape (n,), at least one.
        trim: drop padding common to all rows, down to `padded_length`.
    """
    boundaries = packed.boundaries(rows)
    t = length = packed.sequence_length
    if trim:
        t = padded_length(int(boundaries.filled().max()), length)
    positions = None
    # a row of one piece has its start and its end
    if np.diff(boundaries.offsets).max() > 2:
        positions = boundaries.positions(length)[:, :t].copy()
    return packed.read(rows)[:, :t].copy(), masks.read(rows)[:, :t].copy(), positions
