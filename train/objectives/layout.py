"""What a model reads of packed rows, and what it is to predict at each place.

A layout is a pure function of the rows, their numbers and the step: whoever reads a row in a step, on any number of
processes and after any resume, gets the same inputs and targets.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from gristmill.tokenize.order import mix_bits

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's increment (Steele, Lea & Flood 2014): 2^64 over the golden ratio."""


class Read(NamedTuple):
    """Rows as they were read.

    Attributes:
        tokens: (n, t), as the packed set has them.
        positions: (n, t) int32, each token's number within what it sees, which is its document or its row; negative
            for padding, which lies behind the documents.
        rows: (n,) int64, their numbers in the set.
        first: (n,) int64, the place of each one's first token in its row of the set: 0 but where rows are cut.
    """

    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    first: np.ndarray


class Laid(NamedTuple):
    """Rows as a model is trained on them; (n, t) each, in an encoder-decoder with a t of its own for each side.

    Attributes:
        inputs: ids, int64.
        targets: what is predicted at each place, int64; losses.IGNORED where nothing is.
        prefix: bool, tokens that all of their document, or row, may see; None where none may be seen from before.
        decoder_ids: int64, what a decoder reads beside an encoder's inputs; as many as there are targets.
        places: int64, where each target stands in its row, -1 of one that does not; None where that is `ahead` of where
            it is predicted.
        positions: int32, negative for padding among inputs that are other tokens than the row's; None without any.
    """

    inputs: np.ndarray
    targets: np.ndarray
    prefix: np.ndarray | None = None
    decoder_ids: np.ndarray | None = None
    places: np.ndarray | None = None
    positions: np.ndarray | None = None

    def beside(self) -> dict[str, np.ndarray]:
        """What a model is called with besides ids and positions, by the names of its arguments."""
        given = {"prefix": self.prefix, "decoder_ids": self.decoder_ids}
        return {name: part for name, part in given.items() if part is not None}


class Layout(Protocol):
    """What an objective makes of packed rows."""

    @property
    def ahead(self) -> int:
        """How many places before its own a token is predicted: 1 where the next token is, 0 where it is masked."""

    def __call__(self, read: Read, step: int) -> Laid:
        """Lay out some rows in a step of the training, counted from 0."""


def draws(key: int, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) (float64), one for each row number and place; the arrays have one shape.

    Those of a row are SplitMix64's stream from a hash of the row and the key.
    """
    states = mix_bits(rows.astype(np.uint64), np.uint64(key)) + (places.astype(np.uint64) + np.uint64(1)) * GOLDEN
    found: np.ndarray = (mix_bits(states, np.uint64(0)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found
