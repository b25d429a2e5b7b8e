"""The section `merge`: an average of checkpoints of the pre-training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gristmill.mixtures.base import Positive, PositiveFloat, Section, Several
from gristmill.mixtures.schema.pretrain import Pretrain


class Merge(Section):
    """One model from several checkpoints of `pretrain`, which replaces the pre-trained
    model in all later stages.
    """

    last: Several
    """Number of checkpoints to merge (Li et al. 2025 merge about 10)."""
    every: Positive
    """Steps between merged checkpoints, which are those at multiples of this.
    `engine.checkpoint_every` and `permanent_every` must divide it, so that these
    checkpoints are saved and kept.
    """
    until: Literal["decay", "end"] = "decay"
    """Upper limit for the last of them: the step at which the learning rate of
    `schedule: {kind: wsd}` begins to fall (Sanyal et al. 2023; Li et al. 2025: a merged
    model is about as good there as one after the decay), or the last step.
    """
    weights: Literal["uniform", "linear"] | tuple[PositiveFloat, ...] = "uniform"
    """`uniform`: their mean (LAWA, Sanyal et al. 2023; model soups, Wortsman et al.
    2022). `linear`: weights 1, 2, ... from the oldest to the newest (WMA, Li et al.
    2025). Or a number for each, the oldest first; they are divided by their sum.
    """

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.weights, str) and len(self.weights) != self.last:
            yield (
                f"weights has {len(self.weights)} numbers, but last asks for "
                f"{self.last} checkpoints; give one for each"
            )

    @property
    def shares(self) -> list[float]:
        """Weight of each checkpoint, the oldest first; the weights sum to 1."""
        if self.weights == "uniform":
            weights = [1.0] * self.last
        elif self.weights == "linear":
            weights = [float(position) for position in range(1, self.last + 1)]
        else:
            weights = list(self.weights)
        return [weight / sum(weights) for weight in weights]


def merged_steps(section: Merge, pretrain: Pretrain) -> list[int]:
    """Return the steps whose checkpoints are merged, ascending.

    Raises:
        ValueError: the learning rate has no stable part before a decay, or there are
            fewer such steps.
    """
    limit = pretrain.steps
    schedule = pretrain.schedule
    if section.until == "decay" and (
        schedule.use is not None or schedule.kind not in ("wsd", "constant")
    ):
        kind = "one of your own" if schedule.use is not None else schedule.kind
        raise ValueError(
            f"until: decay needs a learning rate that is stable before it falls (schedule: {{kind: wsd}}), "
            f"but the schedule is {kind}; set until: end"
        )
    if section.until == "decay" and schedule.kind == "wsd":
        limit -= round(schedule.decay_fraction * pretrain.steps)
    steps = list(range(section.every, limit + 1, section.every))[-section.last :]
    if len(steps) < section.last:
        where = (
            "before the decay begins" if section.until == "decay" else "to the last one"
        )
        raise ValueError(
            f"last: {section.last} checkpoints, {section.every} steps apart, but of "
            f"the {limit} steps {where} only {len(steps)} are multiples of "
            f"{section.every}; lower last or every"
        )
    return steps


def merge_problems(
    checkpoint_every: int, permanent_every: int | None, every: int
) -> str | None:
    """Return a sentence on why the checkpoints at multiples of `every` would not be
    kept, or None if they are.
    """
    if permanent_every is None or every % permanent_every or every % checkpoint_every:
        return (
            f"checkpoints of every {every} steps must be saved and kept: set "
            f"engine.checkpoint_every (now {checkpoint_every}) and "
            f"engine.permanent_every (now {permanent_every or 'absent'}) to {every}, "
            "or to divisors of it"
        )
    return None
