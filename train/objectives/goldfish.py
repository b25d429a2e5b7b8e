"""Goldfish loss (Hans et al. 2024): next tokens, of which a hash of the
preceding ones leaves some out of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gristmill.mixtures.objectives.token_objectives import Goldfish
from gristmill.tokenize.shuffle import mix_bits
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.prediction_targets import GOLDEN, Laid, Read


@dataclass(frozen=True)
class GoldfishMask:
    """Layout that leaves some next tokens out (see `Layout`).

    It depends on the tokens only, so copies of a passage leave out the same tokens in
    every step, epoch and training.

    Attributes:
        section: share of excluded tokens, and length of the hashed context.
    """

    section: Goldfish

    ahead = 1

    def __call__(self, read: Read, step: int) -> Laid:
        """Inputs and targets of rows; see `Layout`."""
        ids = read.tokens.astype(np.int64)
        trained = (read.positions >= 0) & ~self.excluded(read)
        targets = np.full(ids.shape, IGNORED)
        targets[:, :-1] = np.where(trained[:, 1:], ids[:, 1:], IGNORED)
        return Laid(ids, targets)

    def excluded(self, read: Read) -> np.ndarray:
        """Tokens without a loss: bool (n, t)."""
        mixed = mix_bits(read.tokens.astype(np.uint64), np.uint64(0))
        distances = np.arange(1, min(self.section.context, mixed.shape[1] - 1) + 1)
        factors = mix_bits(distances.astype(np.uint64), GOLDEN) | np.uint64(1)
        hashes = np.zeros_like(mixed)
        for distance, factor in zip(distances.tolist(), factors, strict=True):
            hashes[:, distance:] += mixed[:, :-distance] * factor
        limit = np.uint64(2**64 // self.section.k)
        return (read.positions >= self.section.context) & (
            mix_bits(hashes, np.uint64(0)) < limit
        )
