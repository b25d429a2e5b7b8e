"""The section `merge`: an average of checkpoints of the pre-training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from gristmill.mixtures.base import Positive, PositiveFloat, Section, repeated


class Merge(Section):
    """One model from several checkpoints of `pretrain`, which replaces the pre-trained
    model in all later stages.
    """

    steps: Annotated[tuple[Positive, ...], Field(min_length=2)]
    """Steps of the checkpoints (Li et al. 2025 merge about 10 before the learning rate
    begins to fall). `engine.checkpoint_every` and `permanent_every` must divide all but
    the last step of the training, so that these checkpoints are saved and kept.
    """
    weights: tuple[PositiveFloat, ...] | None = None
    """Weight of each, in the same order; they are divided by their sum (1, 2, ... from
    the oldest to the newest: WMA, Li et al. 2025). By default all are equal (LAWA,
    Sanyal et al. 2023; model soups, Wortsman et al. 2022).
    """

    def _problems(self) -> Iterator[str]:
        if twice := repeated(self.steps):
            yield f"steps names {twice} twice"
        if self.weights is not None and len(self.weights) != len(self.steps):
            yield (
                f"weights has {len(self.weights)} numbers, but steps has "
                f"{len(self.steps)}; give one for each"
            )
