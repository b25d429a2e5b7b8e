"""Prefix language modelling (Raffel et al. 2020, section 3.2.1): the prefix of each
document.

A document of n tokens (or a row, if documents are not masked) has a prefix of floor(u
n) tokens, with u uniform between two shares. The tokens of the prefix attend to each
other in both directions; the others are predicted from the prefix and the tokens before
them. A prefix of at most one token makes this next-token prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gristmill.mixtures.objectives.token_objectives import PrefixLm
from gristmill.tokenize.shuffle import order_key
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.objectives.prediction_targets import Laid, Read, draws


@dataclass(frozen=True)
class PrefixCut:
    """Layout that splits documents into prefix and targets (see `Layout`).

    Attributes:
        section: range of shares.
        seed: of the draws.
    """

    section: PrefixLm
    seed: int

    ahead = 1

    def __call__(self, read: Read, step: int) -> Laid:
        """Inputs, targets and prefix of rows in a step; see `Layout`."""
        ids = read.tokens.astype(np.int64)
        positions = read.positions
        is_real = positions >= 0
        row, place = np.nonzero(positions == 0)
        # Documents are numbered across all rows; padding has the number of the document
        # before it.
        document = (positions == 0).ravel().cumsum().reshape(ids.shape) - 1
        sizes = np.bincount(document[is_real], minlength=len(row))
        shares = self.section.least + (self.section.most - self.section.least) * draws(
            order_key(self.seed, "prefix", step),
            read.rows[row],
            place + read.first[row],
        )
        lengths = np.minimum((shares * sizes).astype(np.int64), sizes - 1)
        prefix = is_real & (positions < lengths[document])
        predicted = is_real & ~prefix & (positions > 0)
        targets = np.full(ids.shape, IGNORED)
        targets[:, :-1] = np.where(predicted[:, 1:], ids[:, 1:], IGNORED)
        return Laid(ids, targets, prefix)
