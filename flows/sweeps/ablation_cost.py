"""Time of an ablation, from some steps of each size on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

from gristmill.core.files import read_json_lines
from gristmill.flows.planning.quantities import at_least, duration, quantity
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.flows.sweeps.ablation import AblationPlan, prepared_run
from gristmill.flows.sweeps.proxies import METRICS

TIMED = ("pretrain.steps=20", "pretrain.log_every=5")
"""Settings of a training that is only timed; its first steps are slower."""


@dataclass(frozen=True)
class SizeCost:
    """Largest number of trainings of a size, their tokens, and hours of all of them."""

    size: str
    trainings: int
    tokens: int
    hours: float

    def describe(self, price: float | None) -> str:
        """Describe them in a line, with the cost if an hour has a price."""
        cost = "" if price is None else f", {at_least(self.hours * price)}"
        return (
            f"{self.size}: at most {self.trainings} trainings of "
            f"{quantity(self.tokens)} tokens, {duration(self.hours)}{cost}"
        )


def estimate_cost(plan: AblationPlan, output: TextIO) -> list[SizeCost]:
    """Train some steps of each size on the manifest's own documents.

    Args:
        plan: the planned ablation.
        output: stream of the progress display.
    """
    costs = []
    sizes = plan.settings.sizes
    with prepared_run(plan, output) as run:
        for size in sizes:
            trial = next(trial for trial in plan.trials if trial.size == size)
            overrides = run.overrides(trial, plan.variants[0], {}, plan.seeds[0])
            training = plan.open([*overrides, *TIMED])
            run.run_stages(training)
            lines = read_json_lines(training.folder(PRETRAIN).data / METRICS)
            speeds = [line.get("tokens_per_second") for line in lines]
            tokens = plan.tokens_of(trial)
            seconds = tokens / next(filter(None, reversed(speeds)))
            # The time that a training takes to start, and that of its mixture.
            for stage in (MIX, PRETRAIN):
                seconds += training.folder(stage).manifest()["seconds"]
            trainings = plan.num_trainings // len(sizes)
            costs.append(SizeCost(size, trainings, tokens, trainings * seconds / 3600))
    return costs
