"""Which prompts each step learns from: a pure function of the settings, as `loop/stream.py` has it for rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gristmill.mixtures.reinforcement import Rl
from gristmill.train.loop.stream import RowOrder


@dataclass(frozen=True)
class PromptPlan:
    """How the prompts of a batch are shared out to its steps, epoch after epoch.

    Attributes:
        prompts_per_step: each with a whole group of answers.
        steps_per_batch, epochs_per_batch: see the section `rl`.
    """

    prompts_per_step: int
    steps_per_batch: int
    epochs_per_batch: int

    def positions(self, step: int) -> tuple[int, int]:
        """The first position of a step (counted from 0) in the order of the prompts, and how many it takes."""
        batch, within = divmod(step, self.steps_per_batch * self.epochs_per_batch)
        first = batch * self.steps_per_batch + within % self.steps_per_batch
        return first * self.prompts_per_step, self.prompts_per_step

    def rows(self, order: RowOrder, step: int) -> np.ndarray:
        """The numbers of the prompts (int64) of a step."""
        return order.span(*self.positions(step))

    def steps_of(self, positions: np.ndarray) -> np.ndarray:
        """The steps that learn from some positions, counted from 0, int64, (epochs, n): inverts `positions`."""
        batch, within = np.divmod(positions // self.prompts_per_step, self.steps_per_batch)
        epochs = np.arange(self.epochs_per_batch, dtype=np.int64)[:, None]
        steps: np.ndarray = (batch * self.epochs_per_batch + epochs) * self.steps_per_batch + within
        return steps

    def end(self, steps: int) -> int:
        """How many positions so many steps, or the batch that they end in, take."""
        batches = -(-steps // (self.steps_per_batch * self.epochs_per_batch))
        return batches * self.steps_per_batch * self.prompts_per_step


def prompt_plan_of(section: Rl) -> PromptPlan:
    """The plan that a section asks for."""
    return PromptPlan(section.global_batch_size // section.group_size, section.steps_per_batch,
                      section.epochs_per_batch)
