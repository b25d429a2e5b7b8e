"""`gristmill plan --engines`: the size of text from which a cluster takes less time than
this machine.

A chain takes `start_seconds`, and for each GB of text the time of cores, which share it.
Both are fitted through the times of two corpora on two cores, as
`gristmill bench engines` measured them (docs/bench-engines.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gristmill.flows.pages.page_elements import table
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.planning.quantities import duration, size

GIGA = 1e9


class EngineCost(NamedTuple):
    """Cost of a chain on an engine.

    Attributes:
        start_seconds: time of an empty corpus.
        core_seconds_per_gb: time of a core for a GB of text.
    """

    start_seconds: float
    core_seconds_per_gb: float

    def seconds(self, text_bytes: float, cores: int) -> float:
        """Time for some text on some cores."""
        return self.start_seconds + self.core_seconds_per_gb * text_bytes / GIGA / cores


MEASURED = {
    "local": EngineCost(2.7, 142.2),
    "ray": EngineCost(11.9, 139.8),
    "dask": EngineCost(5.4, 170.7),
    "spark": EngineCost(20.8, 132.7),
    "flink": EngineCost(25.7, 221.0),
}
"""Engine -> its cost, from docs/bench-engines.md: 329 to 925 MB."""
TIMES_CORES = (2, 4, 16)
"""Sizes of clusters, as multiples of the cores of this machine."""
EXAMPLE_BYTES = 100 * GIGA


@dataclass(frozen=True)
class EnginePlan:
    """An engine against this machine.

    Attributes:
        engine: its name.
        start_seconds: time of an empty corpus.
        hours: cores of a cluster -> time for EXAMPLE_BYTES of text.
        pays_from_bytes: cores of a cluster -> text from which it takes less time than
            this machine; None if it never does.
    """

    engine: str
    start_seconds: float
    hours: Mapping[int, float]
    pays_from_bytes: Mapping[int, float | None]


def plan_engines(workers: int) -> list[EnginePlan]:
    """Compare clusters with this machine, which uses `workers` cores."""
    local = MEASURED["local"]
    plans = []
    for engine, cost in MEASURED.items():
        sizes = [workers] if engine == "local" else [n * workers for n in TIMES_CORES]
        plans.append(
            EnginePlan(
                engine,
                cost.start_seconds,
                {cores: cost.seconds(EXAMPLE_BYTES, cores) / 3600 for cores in sizes},
                {
                    cores: pays_from(local, workers, cost, cores)
                    for cores in sizes
                    if engine != "local"
                },
            )
        )
    return plans


def pays_from(
    local: EngineCost, workers: int, cluster: EngineCost, cores: int
) -> float | None:
    """Bytes of text from which a cluster takes less time; None if it never does."""
    saved_per_gb = (
        local.core_seconds_per_gb / workers - cluster.core_seconds_per_gb / cores
    )
    if saved_per_gb <= 0:
        return None
    later = cluster.start_seconds - local.start_seconds
    return max(later, 0.0) / saved_per_gb * GIGA


def print_engines(plans: list[EnginePlan]) -> None:
    """Print the comparison."""
    rows = []
    for plan in plans:
        for cores, hours in plan.hours.items():
            least = plan.pays_from_bytes.get(cores)
            rows.append(
                [
                    plan.engine,
                    str(cores),
                    f"{plan.start_seconds:.0f} s",
                    duration(hours),
                    "" if least is None else size(least),
                ]
            )
    example = f"{size(EXAMPLE_BYTES)} of text"
    columns = dict.fromkeys(("cores", "start", example, "less time from"), ">")
    print_parts(
        table({"engine": "", **columns}, rows),
        "From ingest to packed tokens, as measured on two cores by `gristmill bench "
        "engines`; cores share the work evenly.",
    )
