"""Curriculum: selection of prompts by their pass rates (online difficulty filtering).

Prompts have a seeded order, epoch after epoch. A batch takes its next prompts that were
never used, whose last pass rate was within `between`, or that a hash of the seed and
the position in the order selects. The selection is a function of the seed and of the
answers' rewards; position and rates are part of checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gristmill.core.seeds import seeded_key
from gristmill.mixtures.schema.rl import Curriculum
from gristmill.tokenize.shuffle import Order
from gristmill.train.loop.objective import Numbers
from gristmill.train.models.tensor_files import Tensors

NEVER = -1.0
"""Pass rate of a prompt that was never used."""
KEY_BITS = 64


class PromptChoice:
    """Selects the prompts of batches.

    Args:
        section: thresholds.
        order: of the prompts.
        seed: of the training.

    Attributes:
        cursor: () int64, positions read in the order.
        passed_over: () int64, prompts skipped for the last batch.
        rates: (n,) float32, share of each prompt's last answers that passed, or NEVER.
    """

    def __init__(self, section: Curriculum, order: Order, seed: int) -> None:
        self._section = section
        self._order = order
        self._seed = seed
        self.cursor = torch.tensor(0)
        self.passed_over = torch.tensor(0)
        self.rates = torch.full((order.total,), NEVER)

    def tensors(self) -> Tensors:
        """State for a checkpoint, loaded in place."""
        return {
            "cursor": self.cursor,
            "passed_over": self.passed_over,
            "rates": self.rates,
        }

    def choose(self, count: int) -> np.ndarray:
        """Numbers of the next prompts, (count,) int64, in order.

        If a full epoch has too few suitable prompts, the first skipped ones fill the
        batch.
        """
        first = int(self.cursor)
        numbers = self._order.rows(
            np.arange(first, first + max(self._order.total, count), dtype=np.int64)
        )
        low, high = self._section.between
        selected: list[int] = []
        skipped: list[int] = []
        for place, number in enumerate(numbers.tolist(), start=first):
            rate = float(self.rates[number])
            is_suitable = (
                rate == NEVER
                or low < rate < high
                or (
                    seeded_key(self._seed, "again", place)
                    < self._section.again * 2**KEY_BITS
                )
            )
            (selected if is_suitable else skipped).append(number)
            if len(selected) == count:
                break
        read = len(selected) + len(skipped)
        self.cursor.add_(read)
        self.passed_over.fill_(read - count)
        return np.array([*selected, *skipped[: count - len(selected)]], dtype=np.int64)

    def learn(self, prompts: Sequence[int], rates: Tensor) -> None:
        """Record the pass rates of some prompts: shares, (n,)."""
        for number, rate in zip(prompts, rates.tolist(), strict=True):
            self.rates[number] = rate

    def report(self) -> Numbers:
        """Number of prompts skipped for the last batch, share of prompts used so far,
        and of these the shares below, within and above the thresholds.
        """
        known_rates = self.rates[self.rates >= 0.0]
        low, high = self._section.between
        values = {
            "curriculum/passed_over": float(self.passed_over),
            "curriculum/asked": len(known_rates) / len(self.rates),
        }
        if len(known_rates):
            too_low = known_rates <= low
            too_high = known_rates >= high
            values |= {
                "curriculum/too_hard": float(too_low.float().mean()),
                "curriculum/wanted": float((~too_low & ~too_high).float().mean()),
                "curriculum/too_easy": float(too_high.float().mean()),
            }
        return values
