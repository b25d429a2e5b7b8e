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


class Laid(NamedTuple):
    """Rows as a model is trained on them; all (n, t) int64.

    Attributes:
        inputs: ids.
        targets: what is predicted at each place, losses.IGNORED where nothing is.
    """

    inputs: np.ndarray
    targets: np.ndarray


class Layout(Protocol):
    """What an objective makes of packed rows."""

    @property
    def ahead(self) -> int:
        """How many places before its own a token is predicted: 1 where the next token is, 0 where it is masked."""

    def __call__(self, tokens: np.ndarray, filled: np.ndarray, rows: np.ndarray, step: int) -> Laid:
        """Lay out some rows.

        Args:
            tokens: (n, t), as the packed set has them.
            filled: (n,) int64, tokens of documents in each; padding is behind them.
            rows: (n,) int64, their numbers in the set.
            step: of the training, from 0.
        """


def draws(key: int, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) (float64), one for each row number and place; the arrays have one shape.

    Those of a row are SplitMix64's stream from a hash of the row and the key.
    """
    states = mix_bits(rows.astype(np.uint64), np.uint64(key)) + (places.astype(np.uint64) + np.uint64(1)) * GOLDEN
    found: np.ndarray = (mix_bits(states, np.uint64(0)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found
