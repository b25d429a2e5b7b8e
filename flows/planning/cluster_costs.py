"""`gristmill plan MANIFEST --tb 10 --workers 100 --engine flink`: what preparing and mixing that much text takes there.

A simulation for corpora that nobody has at hand. What a step computes and writes is that of `at_scale.py`. What it asks
of an object store follows from the numbers of document shards and of partitions (REQUESTS, as `gristmill bench
requests` counts them), and so does the price. What an engine is handed, and holds while rows are on their way, follows
from the form of its shuffle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from gristmill.dataprep.jobs.tasks import MOST_ELEMENTS
from gristmill.flows.planning.at_scale import (
    CORE_HOUR,
    DOCUMENT_BYTES,
    RECORD_BYTES,
    Cost,
    Extent,
    breaks_of,
    costs_of,
    extent_of,
    sized,
)
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.manifest import Manifest

Law = tuple[float, float, float, float, float]
"""Factors of `terms`."""

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
"""Form of the shuffle -> step -> requests that write or list, and that read: `gristmill bench requests`, of
small shards; of one above the block in which a store's files are read, each block more is a read more."""
SHUFFLED: Mapping[str, tuple[float, float, float]] = {
    "ingest": (0, 0, 0),
    "dedup": (144, 32, 0.22),
    "tokenize": (0, 0, 0),
    "mix": (144, 0, 0.44),
}
"""Step -> bytes that it shuffles, per document, for each of its keys, and per byte of text: of the same bench, whose
documents are duplicates one in ten. More of them take more of the sketches along."""
WORK_MOVES = 4
"""How often a file of a step's work is moved: written once, and read up to three times."""
WRITE_PRICE, READ_PRICE = 0.005, 0.0004
"""US dollars per 1,000 requests: Amazon S3 Standard, us-east-1, list prices (aws.amazon.com/s3/pricing) as of 2026:
PUT, COPY, POST and LIST, and GET and all others. Between S3 and machines of its region nothing is charged for bytes."""
REQUEST_SECONDS = 0.02
"""A request to a store in the same region takes about so long."""
STORE_BYTES = 100e6
"""Per second, of a worker's own share of its machine's network: 12.5 Gbit/s for 16 cores."""


@dataclass(frozen=True)
class Engine:
    """Who shares the work among workers.

    Attributes:
        shuffle: the form of its shuffle (`engine.shuffle`).
        holds: where rows lie while they are on their way.
    """

    shuffle: str
    holds: str


ENGINES: Mapping[str, Engine] = {
    "local": Engine("files", "store"),
    "dask": Engine("engine", "memory"),
    "flink": Engine("engine", "disk"),
    "spark": Engine("engine", "disk"),
    "dataflow": Engine("engine", "service"),
}
"""`local` are hosts that share the store (`engine.nodes`)."""


@dataclass(frozen=True)
class Load:
    """What a step takes on a cluster.

    Attributes:
        step: its name.
        elements: the most that the engine is handed in one job.
        shuffle_bytes: that are on their way from tasks to partitions, in all its jobs.
        writes, reads: requests to the store, by price.
        price: of these, in US dollars.
        memory_bytes: of the largest worker.
        seconds: on all workers, without what the engine takes to start its jobs.
        waiting: the share of them in which answers of the store are waited for.
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
    """In US dollars: per 1,000 requests, and of a core for an hour."""

    write: float = WRITE_PRICE
    read: float = READ_PRICE
    core_hour: float = CORE_HOUR


def loads_of(extent: Extent, engine: Engine, workers: int, prices: Prices) -> list[Load]:
    """What each step takes on so many workers, each with a core."""
    one = replace(extent, workers=1, shuffle=engine.shuffle)
    costs = costs_of(one)
    read_bytes = {
        "ingest": extent.text_bytes,
        "dedup": costs[0].out_bytes,
        "tokenize": costs[0].out_bytes,
        "mix": costs[-2].out_bytes,
    }
    return [_load(one, cost, engine, workers, prices, read_bytes[cost.step]) for cost in costs]


def _load(extent: Extent, cost: Cost, engine: Engine, workers: int, prices: Prices, read_bytes: float) -> Load:
    partitions = max(cost.partitions, cost.row_shards)  # which the bench has as many of
    writes, reads = (asked(law, extent.shards, partitions) for law in REQUESTS[engine.shuffle][cost.step])
    shuffled = _shuffled(cost.step, extent)
    moved = read_bytes + WORK_MOVES * cost.work_bytes + shuffled + cost.out_bytes
    waiting = (writes + reads) * REQUEST_SECONDS
    seconds = cost.core_seconds + waiting + moved / STORE_BYTES
    tasks = max(extent.shards, partitions)
    elements = tasks if engine.shuffle == "files" else min(tasks, MOST_ELEMENTS)
    return Load(
        cost.step,
        elements,
        shuffled,
        writes,
        reads,
        (writes * prices.write + reads * prices.read) / 1000,
        cost.memory_bytes - RECORD_BYTES * extent.shards,
        seconds / min(workers, tasks),
        waiting / seconds,
    )


def _shuffled(step: str, extent: Extent) -> float:
    per_document, per_key, per_byte = SHUFFLED[step]
    return extent.documents * (per_document + per_key * extent.keys + per_byte * extent.document_bytes)


def terms(shards: int, partitions: int) -> tuple[float, float, float, float, float]:
    """What numbers of requests are made of: tasks of both kinds, and files between each two of them."""
    return 1.0, float(shards), float(partitions), float(shards * partitions), float(partitions**2)


def asked(law: Law, shards: int, partitions: int) -> float:
    """How many requests a law says."""
    return sum(factor * term for factor, term in zip(law, terms(shards, partitions), strict=True))


def holds_of(engine: Engine, loads: Sequence[Load], workers: int) -> Iterator[str]:
    """Where shuffled rows lie, and how many bytes of them, in sentences."""
    most = max(loads, key=lambda load: load.shuffle_bytes)
    said = f"{most.step} shuffles {sized(most.shuffle_bytes)}"
    if engine.holds == "memory":
        yield (
            f"{said}: {sized(most.shuffle_bytes / workers)} in the memory of each worker, or on its disk where that "
            "is full"
        )
    elif engine.holds == "disk":
        yield f"{said}: {sized(most.shuffle_bytes / workers)} on the disk of each worker"
    elif engine.holds == "service":
        yield f"{said} through the engine's own service, which charges for them"
    else:
        yield f"{said} through files in the store"


def waits_of(loads: Sequence[Load]) -> Iterator[str]:
    """Which steps wait for the store more than they work, in sentences."""
    for load in loads:
        if load.waiting > 0.5:
            yield (
                f"{load.step}: {load.waiting:.0%} of its time are requests to the store, mostly for each "
                "document shard and partition; with a larger ingest.shard_bytes there are fewer"
            )


def plan_on_cluster(
    manifest: Manifest,
    terabytes: Sequence[float],
    engines: Sequence[str],
    workers: int,
    document_bytes: float = DOCUMENT_BYTES,
    prices: Prices | None = None,
) -> list[dict[str, Any]]:
    """What each amount of text takes on each engine.

    Args:
        terabytes: of text, 10^12 bytes.
        engines: of ENGINES.

    Returns:
        for each, `terabytes`, `engine`, `workers`, `shards`, `steps` (`Load` as objects), `totals` (`requests`,
        `price` of requests, `core_price` of the workers' time, `memory_bytes` of the largest worker, `hours`), and
        `sentences`.
    """
    prices = prices or Prices()
    found = []
    for amount in terabytes:
        extent = replace(extent_of(manifest, amount * 1e12 / document_bytes, document_bytes), sends=True)
        for name in engines:
            loads = loads_of(extent, ENGINES[name], workers, prices)
            hours = sum(load.seconds for load in loads) / 3600
            found.append(
                {
                    "terabytes": amount,
                    "engine": name,
                    "workers": workers,
                    "shards": extent.shards,
                    "steps": [vars(load) for load in loads],
                    "totals": {
                        "requests": sum(load.writes + load.reads for load in loads),
                        "price": sum(load.price for load in loads),
                        "core_price": hours * workers * prices.core_hour,
                        "memory_bytes": max(load.memory_bytes for load in loads),
                        "hours": hours,
                    },
                    "sentences": [
                        *holds_of(ENGINES[name], loads, workers),
                        *waits_of(loads),
                        *(sentence for sentence in breaks_of(extent) if not sentence.startswith("explain")),
                    ],
                }
            )
    return found


def print_on_cluster(found: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for each amount and engine; it fits 60 columns."""
    console = plain_console()
    for one in found:
        totals = one["totals"]
        console.print(
            Text(
                f"{one['terabytes']:g} TB of text in {one['shards']:,} document shards on {one['workers']} "
                f"workers: {one['engine']}",
                style="bold",
            )
        )
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("step", no_wrap=True)
        for name in ("elements", "shuffle", "requests", "US $", "memory", "hours"):
            table.add_column(name, justify="right", no_wrap=True)
        for step in one["steps"]:
            table.add_row(
                step["step"],
                f"{step['elements']:,}",
                sized(step["shuffle_bytes"]),
                _count(step["writes"] + step["reads"]),
                f"{step['price']:,.0f}",
                sized(step["memory_bytes"]),
                f"{step['seconds'] / 3600:.1f}",
            )
        console.print(table)
        console.print(
            Text(
                f"{totals['hours']:,.1f} hours; {_count(totals['requests'])} requests to the store for "
                f"{totals['price']:,.0f} US dollars, workers for {totals['core_price']:,.0f}; "
                f"{sized(totals['memory_bytes'])} of memory in the largest worker"
            )
        )
        for sentence in one["sentences"]:
            console.print(Text(f"- {sentence}", style="yellow"))
        console.print()


def _count(number: float) -> str:
    for unit, size in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
