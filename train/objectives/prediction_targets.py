"""Layouts: inputs and targets of a model from packed rows.

A layout is a pure function of the rows, their numbers and the step: a row has the same
inputs and targets in a step on any number of processes and after any resume.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from gristmill.tokenize.shuffle import mix_bits

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Increment of SplitMix64 (Steele, Lea & Flood 2014): 2^64 over the golden ratio."""


class Read(NamedTuple):
    """Rows of a packed set.

    Attributes:
        tokens: (n, t), in the packed set's dtype.
        positions: (n, t) int32, position of each token in its document or row,
            whichever it attends to; negative for padding, which follows the documents.
        rows: (n,) int64, their numbers in the set.
        first: (n,) int64, index of each row's first token in its row of the set: 0
            unless rows are cut.
    """

    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    first: np.ndarray


class Laid(NamedTuple):
    """Rows as inputs of a model; (n, t) each. In an encoder-decoder the two sides may
    differ in t.

    Attributes:
        inputs: ids, int64.
        targets: predicted id at each place, int64; losses.IGNORED if there is none.
        prefix: bool, tokens that all tokens of their document, or row, attend to; None
            for causal attention only.
        decoder_ids: int64, inputs of the decoder beside an encoder's inputs; in the
            shape of the targets.
        places: int64, index of each target in its row, -1 if it is not part of the row;
            None if that is `ahead` of its place.
        positions: int32, negative for padding, if the inputs differ from the row's
            tokens; None without padding.
    """

    inputs: np.ndarray
    targets: np.ndarray
    prefix: np.ndarray | None = None
    decoder_ids: np.ndarray | None = None
    places: np.ndarray | None = None
    positions: np.ndarray | None = None

    def beside(self) -> dict[str, np.ndarray]:
        """Keyword arguments of the model besides ids and positions."""
        arguments = {"prefix": self.prefix, "decoder_ids": self.decoder_ids}
        return {name: array for name, array in arguments.items() if array is not None}


class Layout(Protocol):
    """Function from packed rows to inputs and targets."""

    @property
    def ahead(self) -> int:
        """Offset of a target from its place: 1 for next tokens, 0 for masked tokens."""

    def __call__(self, read: Read, step: int) -> Laid:
        """Lay out rows in a step of the training, counted from 0."""


def draws(key: int, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) (float64) for each row number and place; the arrays
    have one shape.

    The numbers of a row are SplitMix64's stream, seeded by a hash of the row and the
    key.
    """
    states = (
        mix_bits(rows.astype(np.uint64), np.uint64(key))
        + (places.astype(np.uint64) + np.uint64(1)) * GOLDEN
    )
    return (mix_bits(states, np.uint64(0)) >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53
