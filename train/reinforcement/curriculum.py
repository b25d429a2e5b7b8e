"""Which prompts a batch answers, where those that teach come more often (online difficulty filtering).

The prompts have their seeded order, epoch after epoch. A batch takes the next ones of it that are wanted: those that
were never asked, those of which a share within `between` had passed the last time, and a few of the others, chosen by a
hash of the seed and the place in the order. So what is asked follows from the seed and from what came of the answers;
how far the order was read and the rates lie in checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gristmill.dataprep.seeds import seeded_key
from gristmill.mixtures.reinforcement import Curriculum
from gristmill.tokenize.order import Order

NEVER = -1.0
"""In place of a pass rate, of a prompt that was never asked."""
KEY_BITS = 64


class PromptChoice:
    """Chooses the prompts of batches.

    Args:
        section: what is wanted.
        order: of the prompts.
        seed: of the training.

    Attributes:
        cursor: () int64, places of the order that were read.
        passed_over: () int64, of the last batch.
        rates: (n,) float32, of each prompt the share of answers that passed when it was last asked, or NEVER.
    """

    def __init__(self, section: Curriculum, order: Order, seed: int) -> None:
        self._section, self._order, self._seed = section, order, seed
        self.cursor, self.passed_over = torch.tensor(0), torch.tensor(0)
        self.rates = torch.full((order.total,), NEVER)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint; filled in place when one is loaded."""
        return {"cursor": self.cursor, "passed_over": self.passed_over, "rates": self.rates}

    def choose(self, count: int) -> np.ndarray:
        """The numbers of the next prompts, (count,) int64, in their order.

        Where a whole epoch of the order has not enough that are wanted, those that were passed over first fill up.
        """
        first = int(self.cursor)
        numbers = self._order.rows(np.arange(first, first + max(self._order.total, count), dtype=np.int64))
        taken: list[int] = []
        skipped: list[int] = []
        for place, number in enumerate(numbers.tolist(), start=first):
            (taken if self._is_wanted(number, place) else skipped).append(number)
            if len(taken) == count:
                break
        read = len(taken) + len(skipped)
        self.cursor.add_(read)
        self.passed_over.fill_(read - count)
        return np.array([*taken, *skipped[: count - len(taken)]], dtype=np.int64)

    def learn(self, prompts: Sequence[int], rates: Tensor) -> None:
        """Take down how many answers to some prompts have passed: shares, (n,)."""
        for number, rate in zip(prompts, rates.tolist(), strict=True):
            self.rates[number] = rate

    def _is_wanted(self, number: int, place: int) -> bool:
        low, high = self._section.between
        rate = float(self.rates[number])
        return (
            rate == NEVER
            or low < rate < high
            or (seeded_key(self._seed, "again", place) < self._section.again * 2**KEY_BITS)
        )

    def report(self) -> dict[str, float]:
        """How many prompts were passed over for the last batch, and what is known of all: shares that were asked, and
        of these the shares below, within and above what is wanted."""
        asked = self.rates[self.rates >= 0.0]
        low, high = self._section.between
        found = {"curriculum/passed_over": float(self.passed_over), "curriculum/asked": len(asked) / len(self.rates)}
        if len(asked):
            below, above = asked <= low, asked >= high
            found |= {
                "curriculum/too_hard": float(below.float().mean()),
                "curriculum/wanted": float((~below & ~above).float().mean()),
                "curriculum/too_easy": float(above.float().mean()),
            }
        return found
