"""Training rows: tokens, their loss mask, and positions within documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import padded_length


@dataclass(frozen=True)
class TrainedRows:
    """Rows in host memory.

    Attributes:
        ids: (n, t) int64.
        trained: (n, t) bool, True for tokens predicted from those before them, never
            the first of a row. None: all.
        positions: (n, t) int32, each token's position within its document, negative in
            the padding; None if the model sees a row as one document.
    """

    ids: np.ndarray
    trained: np.ndarray | None
    positions: np.ndarray | None


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


def read_documents(
    packed: PackedSet, rows: np.ndarray, document_mask: bool
) -> TrainedRows:
    """Rows of a mixture: all tokens but padding have a loss.

    Args:
        packed: the set.
        rows: int64 of shape (n,).
        document_mask: True if tokens attend only to their own document.
    """
    filled = filled_tokens(packed, rows)
    length = packed.sequence_length
    trained = None if (filled == length).all() else np.arange(length) < filled[:, None]
    return TrainedRows(
        packed.read(rows),
        trained,
        document_positions(packed, rows) if document_mask else None,
    )


def read_turns(
    packed: PackedSet, masks: LossMasks, rows: np.ndarray, trim: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Ids, trained and positions of rows of examples, as of TrainedRows; positions only
    if a row holds several.

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
