"""`gristmill plan MANIFEST --tb 10 --workers 100 --engine flink`: cost of preparing and
mixing text on a cluster.

A simulation for corpora that are not at hand. Computation and output of a step are
those of `at_scale.py`. Requests to the object store, and their price, follow from the
numbers of document shards and partitions (REQUESTS, as counted by `gristmill bench
requests`). The elements and shuffled bytes of an engine follow from the form of its
shuffle.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gristmill.dataprep.runners.tasks import MOST_ELEMENTS
from gristmill.flows.pages.page_elements import table
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.planning.at_scale import (
    CORE_HOUR,
    DOCUMENT_BYTES,
    RECORD_BYTES,
    Extent,
    breaks_of,
    costs_of,
    extent_of,
)
from gristmill.flows.planning.quantities import quantity, size
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.manifest import Manifest

Law = tuple[float, float, float, float, float]
"""Coefficients of `terms`."""

REQUESTS: Mapping[str, Mapping[str, tuple[Law, Law]]] = {
    "files": {
        "ingest": ((6, 3, 0, 0, 0), (3, 4, 0, 0, 0)),
        "dedup": ((68.79, 15.79, 8.73, 0, 0), (48, 62, 14, 16, 8)),
        "tokenize": ((17, 5, 0, 0, 0), (10, 18, 0, 0, 0)),
        "mix": ((65.51, 7.04, 14.12, 0, 0), (133.67, 46.44, 0, 11.12, 8.54)),
    },
    "engine": {
        "ingest": ((6, 3, 0, 0, 0), (3, 4, 0, 0, 0)),
        "dedup": ((101, 18, 11, 0, 0), (54, 49, 19, 0, 0)),
        "tokenize": ((17, 5, 0, 0, 0), (10, 18, 0, 0, 0)),
        "mix": ((75.75, 5.81, 19.31, 0, 0), (58.5, 22.75, 36.38, 0, 0)),
    },
}
"""Form of the shuffle -> step -> requests that write or list, and that read: from
`gristmill bench requests` with small shards; a shard larger than the block size of
reads costs one more read per block.
"""
SHUFFLED: Mapping[str, tuple[float, float, float]] = {
    "ingest": (0, 0, 0),
    "dedup": (144, 32, 0.22),
    "tokenize": (0, 0, 0),
    "mix": (144, 0, 0.44),
}
"""Step -> bytes that it shuffles per document, per key of a document, and per byte of
text: from the same benchmark, in which one in ten documents is a duplicate. More
duplicates shuffle more sketches.
"""
WORK_MOVES = 4
"""Transfers of a temporary file: one write and up to three reads."""
WRITE_PRICE, READ_PRICE = 0.005, 0.0004
"""US dollars per 1,000 requests (PUT, COPY, POST and LIST; GET and all others): list
prices of Amazon S3 Standard, us-east-1 (aws.amazon.com/s3/pricing) as of 2026.
Transfers between S3 and machines of its region are free.
"""
REQUEST_SECONDS = 0.02
"""Approximate latency of a request to a store in the same region."""
STORE_BYTES = 100e6
"""Bytes per second of a worker's share of its machine's network: 12.5 Gbit/s for 16
cores.
"""


@dataclass(frozen=True)
class Engine:
    """Properties of an engine that distributes the work.

    Attributes:
        shuffle: form of its shuffle (`engine.shuffle`).
        location: storage of shuffled rows.
    """

    shuffle: str
    location: str


ENGINES: Mapping[str, Engine] = {
    "local": Engine("files", "store"),
    "dask": Engine("engine", "memory"),
    "flink": Engine("engine", "disk"),
    "spark": Engine("engine", "disk"),
    "dataflow": Engine("engine", "service"),
}
"""Engines by name; `local` means hosts that share the store (`engine.nodes`)."""


@dataclass(frozen=True)
class Load:
    """Cost of a step on a cluster.

    Attributes:
        step: name of the step.
        elements: maximum number of elements in one job of the engine.
        shuffle_bytes: bytes shuffled from tasks to partitions in all its jobs.
        writes, reads: requests to the store, by price class.
        price: price of these requests in US dollars.
        memory_bytes: memory of the largest worker.
        seconds: duration on all workers, without the engine's startup of jobs.
        waiting: share of the time spent waiting for the store.
    """

    step: str
    elements: int
    shuffle_bytes: float
    writes: float
    reads: float
    price: float
    memory_bytes: float
    seconds: float
    waiting: float


@dataclass(frozen=True)
class Prices:
    """US dollars per 1,000 requests, and per hour of a core."""

    write: float = WRITE_PRICE
    read: float = READ_PRICE
    core_hour: float = CORE_HOUR


PRICES = Prices()


def loads_of(
    extent: Extent, engine: Engine, workers: int, prices: Prices
) -> list[Load]:
    """Return the cost of each step on a number of workers with one core each."""
    extent = replace(extent, workers=1, shuffle=engine.shuffle)
    costs = costs_of(extent)
    read_bytes = {
        "ingest": extent.text_bytes,
        "dedup": costs[0].out_bytes,
        "tokenize": costs[0].out_bytes,
        "mix": costs[-2].out_bytes,
    }
    loads = []
    for cost in costs:
        partitions = max(cost.partitions, cost.row_shards)  # equal in the benchmark
        writes, reads = (
            asked(law, extent.shards, partitions)
            for law in REQUESTS[engine.shuffle][cost.step]
        )
        per_document, per_key, per_byte = SHUFFLED[cost.step]
        shuffled = extent.documents * (
            per_document + per_key * extent.keys + per_byte * extent.document_bytes
        )
        moved = WORK_MOVES * cost.work_bytes + shuffled + cost.out_bytes
        moved += read_bytes[cost.step]
        waiting = (writes + reads) * REQUEST_SECONDS
        seconds = cost.core_seconds + waiting + moved / STORE_BYTES
        tasks = max(extent.shards, partitions)
        loads.append(
            Load(
                cost.step,
                tasks if engine.shuffle == "files" else min(tasks, MOST_ELEMENTS),
                shuffled,
                writes,
                reads,
                (writes * prices.write + reads * prices.read) / 1000,
                cost.memory_bytes - RECORD_BYTES * extent.shards,
                seconds / min(workers, tasks),
                waiting / seconds,
            )
        )
    return loads


def terms(shards: int, partitions: int) -> tuple[int, int, int, int, int]:
    """Return the terms of a request count: 1, tasks of both kinds, and files between
    each pair of tasks.
    """
    return 1, shards, partitions, shards * partitions, partitions**2


def asked(law: Law, shards: int, partitions: int) -> float:
    """Evaluate a law: the number of requests."""
    return sum(map(operator.mul, law, terms(shards, partitions)))


def holds_of(engine: Engine, loads: Sequence[Load], workers: int) -> str:
    """Describe the location and amount of shuffled rows in a sentence."""
    largest = max(loads, key=lambda load: load.shuffle_bytes)
    share = size(largest.shuffle_bytes / workers)
    place = {
        "memory": f": {share} in the memory of each worker, or on its disk if that is "
        "full",
        "disk": f": {share} on the disk of each worker",
        "service": " through the engine's own service, which charges for them",
        "store": " through files in the store",
    }[engine.location]
    return f"{largest.step} shuffles {size(largest.shuffle_bytes)}{place}"


@dataclass(frozen=True)
class ClusterTotals:
    """Cost of all steps.

    Attributes:
        requests: number of requests to the store.
        price: of the requests, in US dollars.
        core_price: of the workers' time.
        memory_bytes: of the largest worker.
        hours: duration.
    """

    requests: float
    price: float
    core_price: float
    memory_bytes: float
    hours: float


@dataclass(frozen=True)
class ClusterPlan:
    """Cost of preparing an amount of text on an engine.

    Attributes:
        terabytes: 10^12 bytes of text.
        engine: a key of ENGINES.
        workers: number of workers.
        shards: number of document shards.
        steps: cost of each step, in order.
        totals: cost of all steps.
        sentences: where shuffled rows are held, and the limits that are exceeded.
    """

    terabytes: float
    engine: str
    workers: int
    shards: int
    steps: list[Load]
    totals: ClusterTotals
    sentences: list[str]


def plan_on_cluster(
    manifest: Manifest,
    terabytes: Sequence[float],
    engines: Sequence[str],
    workers: int,
    document_bytes: float = DOCUMENT_BYTES,
    prices: Prices = PRICES,
) -> list[ClusterPlan]:
    """Compute the cost of each amount of text on each engine.

    Args:
        terabytes: amounts of text in 10^12 bytes.
        engines: keys of ENGINES.
    """
    plans = []
    for amount in terabytes:
        extent = replace(
            extent_of(manifest, amount * 1e12 / document_bytes, document_bytes),
            sends=True,
        )
        breaks = [text for text in breaks_of(extent) if not text.startswith("explain")]
        for name in engines:
            loads = loads_of(extent, ENGINES[name], workers, prices)
            hours = sum(load.seconds for load in loads) / 3600
            totals = ClusterTotals(
                sum(load.writes + load.reads for load in loads),
                sum(load.price for load in loads),
                hours * workers * prices.core_hour,
                max(load.memory_bytes for load in loads),
                hours,
            )
            waits = [
                f"{load.step}: {load.waiting:.0%} of its time is spent on requests to "
                "the store, mostly for each document shard and partition; a larger "
                "ingest.shard_bytes needs fewer"
                for load in loads
                if load.waiting > 0.5
            ]
            sentences = [holds_of(ENGINES[name], loads, workers), *waits, *breaks]
            plans.append(
                ClusterPlan(
                    amount, name, workers, extent.shards, loads, totals, sentences
                )
            )
    return plans


def print_on_cluster(plans: Sequence[ClusterPlan]) -> None:
    """Print a table for each amount and engine, at most 60 columns wide."""
    console = plain_console()
    for plan in plans:
        totals = plan.totals
        console.print(
            f"{plan.terabytes:g} TB of text in {plan.shards:,} document "
            f"shards on {plan.workers} workers: {plan.engine}",
            style="bold",
        )
        rows = [
            (
                step.step,
                step.elements,
                size(step.shuffle_bytes),
                quantity(step.writes + step.reads),
                step.price,
                size(step.memory_bytes),
                step.seconds / 3600,
            )
            for step in plan.steps
        ]
        columns = {"step": "", "elements": ",", "shuffle": ">", "requests": ">"}
        columns |= {"US $": ",.0f", "memory": ">", "hours": ".1f"}
        print_table(console, table(columns, rows))
        console.print(
            f"{totals.hours:,.1f} hours; {quantity(totals.requests)} requests to the "
            f"store for {totals.price:,.0f} US dollars, workers for "
            f"{totals.core_price:,.0f}; {size(totals.memory_bytes)} of memory in the "
            "largest worker"
        )
        for sentence in plan.sentences:
            console.print(f"- {sentence}", style="yellow")
        console.print()
