"""Time and cost of an ablation, from some steps of each size on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

from gristmill.core.files import read_json_lines
from gristmill.flows.pages.page_elements import table
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.planning.quantities import at_least, duration, quantity
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.stages.registry import MIX, PRETRAIN
from gristmill.flows.sweeps.ablation import AblationPlan, prepared_run
from gristmill.flows.sweeps.proxies import METRICS

TIMED_STEPS = 20
"""Steps of a training that is only timed; the first ones are slower."""


@dataclass(frozen=True)
class SizeCost:
    """Time of all trainings of a size.

    Attributes:
        size: of the proxies.
        trainings: largest number of trainings.
        tokens: of each training.
        tokens_per_second: measured speed.
        hours: of all trainings, with the time that each takes to start.
        cost: in the currency of the price; None without one.
    """

    size: str
    trainings: int
    tokens: int
    tokens_per_second: float
    hours: float
    cost: float | None


def estimate_cost(
    plan: AblationPlan, output: TextIO, price: float | None = None
) -> list[SizeCost]:
    """Train some steps of each size on the manifest's own documents.

    Args:
        plan: the planned ablation.
        output: stream of the progress display.
        price: of an hour of this machine.
    """
    costs = []
    with prepared_run(plan, output) as run:
        for size in plan.settings.sizes:
            trial = next(trial for trial in plan.trials if trial.size == size)
            training = run.open(
                trial,
                plan.variants[0],
                {},
                plan.seeds[0],
                [f"pretrain.steps={TIMED_STEPS}", "pretrain.log_every=5"],
            )
            run.run_stages(training)
            folder = training.folder(PRETRAIN)
            lines = read_json_lines(folder.data / METRICS)
            speed = [
                line["tokens_per_second"]
                for line in lines
                if "tokens_per_second" in line
            ][-1]
            tokens = plan.tokens_of(trial)
            seconds = folder.manifest()["seconds"] + tokens / speed
            seconds += training.folder(MIX).manifest()["seconds"]
            trainings = plan.num_trainings // len(plan.settings.sizes)
            hours = trainings * seconds / 3600
            cost = None if price is None else hours * price
            costs.append(SizeCost(size, trainings, tokens, speed, hours, cost))
    return costs


def print_cost(costs: list[SizeCost]) -> None:
    """Print the time of each size, and the whole."""
    console = plain_console()
    columns = {"size": "", "trainings": ",", "tokens each": ">", "tokens/s": ",.0f"}
    columns |= {"time": ">", "cost": ">"}
    rows = [
        (
            cost.size,
            cost.trainings,
            quantity(cost.tokens),
            cost.tokens_per_second,
            duration(cost.hours),
            "" if cost.cost is None else at_least(cost.cost),
        )
        for cost in costs
    ]
    print_table(console, table(columns, rows))
    hours = sum(cost.hours for cost in costs)
    console.print(f"at most {duration(hours)} of trainings on this machine")
