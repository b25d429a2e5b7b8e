"""`gristmill plan MANIFEST --documents 1e9`: cost of preparing and mixing a corpus, and
the limits that it reaches.

`predict.py` runs samples of a manifest's own sources; this module computes, for corpora
that are not at hand. The time and bytes of a step are linear in documents and bytes of
text (RATES, measured by `gristmill bench bounds` at 200 and at 1,000 bytes per
document). Memory per process and numbers of files and partitions follow from the
constants of the steps, so the result also names the sizes at which these limits are
reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rich.table import Table
from rich.text import Text

from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.duplicates.dedup_keys import BYTES_PER_KEY, keys_per_document
from gristmill.dataprep.shuffle_format import (
    MOST_PARTITIONS,
    PARTITION_BYTES,
    count_partitions,
)
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.tokenize.mixing import streams
from gristmill.tokenize.mixing.candidates import CANDIDATE_BYTES
from gristmill.tokenize.mixing.ledger import FILE_DOCUMENTS
from gristmill.tokenize.mixing.mix import SHARD_BYTES
from gristmill.tokenize.mixing.row_layout import PLACED_BYTES
from gristmill.tokenize.mixing.streams import ENTRY_BYTES, partition_bits
from gristmill.tokenize.mixing.write_shards import MOST_PARTS, PIECE_BYTES

CORE_HOUR = 0.05
"""US dollars per hour of a virtual core: typical on-demand price of general-purpose
machines at large clouds.
"""
DOCUMENT_BYTES = 3000
"""Mean bytes of a FineWeb page: its sample of 10 billion tokens has 14.9 million pages
(Penedo et al. 2024).
"""
TOKEN_BYTES = 4.5
"""Text bytes per token of English with a vocabulary of 32,000 or more."""
RECORD_BYTES = 1500
"""Memory of a task in the process that starts a job: its name, payload and result."""
OPEN_SECONDS, BATCH_BYTES = 45e-6, 465
"""Seconds to open a file that a partition is read from; bytes of such a file per
partition besides its rows.
"""
PART_SECONDS = 20e-6
"""Seconds to open and map a token part; every shard of rows maps all parts."""
ID_SECONDS = 40e-9
"""Seconds per document to search for an id that no mixture knows
(`row_groups.find_ids`).
"""
ROW_BYTES = 4096
"""A disk page, read per document if the token parts are not in memory."""


MOST_SHARDS = 100_000
"""Maximum number of document shards: larger folders are slow to list."""


LARGEST_SHARD = 2_000_000_000
"""Maximum bytes of text in a shard: a string column of Arrow addresses 2 GiB."""


@dataclass(frozen=True)
class Rates:
    """Cost of a step per document and per byte of text.

    Attributes:
        start: fixed seconds of one core.
        seconds: seconds of one core, per document and per byte.
        work: bytes of temporary files, per document and per byte.
        out: bytes of output, per document and per byte.
        memory: bytes per process besides its data: libraries, kernels, batches.
        shards: memory per document shard in a worker, as a multiple of its text.
        sorting: memory to sort a partition, as a multiple of its size.
        processes: True if its workers are processes.
    """

    start: float
    seconds: tuple[float, float]
    work: tuple[float, float]
    out: tuple[float, float]
    memory: float
    shards: float = 0.0
    sorting: float = 0.0
    processes: bool = False


RATES: Mapping[str, Rates] = {
    "ingest": Rates(
        2.3, (2.3e-6, 6.6e-9), (0, 0), (24, 0.38), 145e6, shards=5, processes=True
    ),
    "dedup": Rates(
        4.0, (8.6e-6, 18.7e-9), (748, 0.59), (169, 0.51), 457e6, sorting=2.1
    ),
    "tokenize": Rates(2.5, (0.5e-6, 13e-9), (0, 0), (20, 0.46), 240e6, shards=8),
    "mix": Rates(2.5, (2.6e-6, 0.8e-9), (0, 0), (50, 0.46), 290e6, sorting=7),
}
"""Measured on two shared cores. The temporary files of `mix` are computed from its rows
instead.
"""


@dataclass(frozen=True)
class Extent:
    """A corpus and the settings of its preparation.

    Attributes:
        documents: number of documents read.
        document_bytes: mean bytes of text per document.
        kept: share of documents that reach the mixture.
        shard_bytes: bytes of text per document shard (`ingest.shard_bytes`).
        workers: number of parallel workers.
        keys: number of `dedup` keys per document.
        sequence_length: tokens per row.
        shuffle: `files`, where a partition is read from all shards, or `engine`, where
            it is one (`engine.shuffle`).
        sends: True if tasks are sent rows that they would otherwise read from files
            (`jobs/shuffled.py: must_send`).
    """

    documents: float
    document_bytes: float = DOCUMENT_BYTES
    kept: float = 1.0
    shard_bytes: int = 16_000_000
    workers: int = 2
    keys: int = 15
    sequence_length: int = 2048
    shuffle: str = "files"
    sends: bool = False

    @property
    def text_bytes(self) -> float:
        """Bytes of text of all documents."""
        return self.documents * self.document_bytes

    @property
    def shards(self) -> int:
        """Number of document shards."""
        return ceil(self.text_bytes / self.shard_bytes)

    @property
    def senders(self) -> int:
        """Number of files that a partition is read from."""
        return self.shards if self.shuffle == "files" else 1

    @property
    def tokens(self) -> float:
        """Number of tokens of the kept documents, including end-of-text tokens."""
        return self.documents * self.kept * (self.document_bytes / TOKEN_BYTES + 1)

    @property
    def pieces(self) -> float:
        """Number of pieces of documents in rows: each row boundary within a document
        adds one.
        """
        return self.documents * self.kept + self.tokens / self.sequence_length


def extent_of(
    manifest: Manifest, documents: float, document_bytes: float = DOCUMENT_BYTES
) -> Extent:
    """Return the extent of a corpus prepared by a manifest."""
    section = next(
        (step.config for step in manifest.prepare if isinstance(step.config, Dedup)),
        None,
    )
    return Extent(
        documents,
        document_bytes,
        shard_bytes=manifest.ingest.shard_bytes,
        workers=manifest.engine.workers,
        keys=keys_per_document(section) if section is not None else 0,
        sequence_length=manifest.mix.sequence_length
        if manifest.mix is not None
        else 2048,
    )


@dataclass(frozen=True)
class Cost:
    """Cost of a step.

    Attributes:
        step: name of the step.
        core_seconds: processor time of all workers.
        memory_bytes: memory of all its processes, without mapped files.
        work_bytes: bytes of temporary files.
        out_bytes: bytes of output.
        files: number of temporary and output files.
        partitions: number of partitions that it sorts; 1 if it does not sort.
        row_shards: number of shards of rows that it writes.
    """

    step: str
    core_seconds: float
    memory_bytes: float
    work_bytes: float
    out_bytes: float
    files: int
    partitions: int
    row_shards: int = 0


def costs_of(extent: Extent) -> list[Cost]:
    """Return the cost of each step in order; `dedup` is included if documents have
    keys.
    """
    costs = [_cost_by_shards("ingest", extent, files_per_shard=2)]
    if extent.keys:
        costs.append(_dedup(extent))
    costs.append(_cost_by_shards("tokenize", extent, files_per_shard=4))
    costs.append(_mix(extent))
    return costs


def _linear(per_document_and_byte: tuple[float, float], extent: Extent) -> float:
    return extent.documents * (
        per_document_and_byte[0] + per_document_and_byte[1] * extent.document_bytes
    )


def _seconds(rates: Rates, extent: Extent) -> float:
    return rates.start + _linear(rates.seconds, extent)


def _shard_memory(rates: Rates, extent: Extent) -> float:
    """Return the memory of all workers, each with one shard, and of the parent process,
    with a record per task.
    """
    shard = rates.shards * min(extent.shard_bytes, extent.text_bytes)
    processes = extent.workers if rates.processes else 0
    return (
        rates.memory * (1 + processes)
        + min(extent.workers, extent.shards) * shard
        + RECORD_BYTES * extent.shards
    )


def _dedup(extent: Extent) -> Cost:
    rates = RATES["dedup"]
    key_bytes = extent.documents * extent.keys * BYTES_PER_KEY
    partitions = count_partitions(int(key_bytes))
    sorting = extent.workers * rates.sorting * key_bytes / partitions
    pieces = extent.senders * partitions
    return Cost(
        "dedup",
        core_seconds=_seconds(rates, extent) + pieces * OPEN_SECONDS,
        memory_bytes=_shard_memory(rates, extent) + sorting,
        work_bytes=_linear(rates.work, extent) + BATCH_BYTES * pieces,
        out_bytes=_linear(rates.out, extent),
        files=6 * extent.shards + 7 * partitions,
        partitions=partitions,
    )


def _cost_by_shards(step: str, extent: Extent, files_per_shard: int) -> Cost:
    """Return the cost of a step that maps document shards and sorts nothing."""
    rates = RATES[step]
    return Cost(
        step,
        core_seconds=_seconds(rates, extent),
        memory_bytes=_shard_memory(rates, extent),
        work_bytes=0,
        out_bytes=_linear(rates.out, extent),
        files=files_per_shard * extent.shards,
        partitions=1,
    )


def _mix(extent: Extent) -> Cost:
    rates, documents = RATES["mix"], extent.documents * extent.kept
    segments = 1 << partition_bits(int(documents), ENTRY_BYTES)
    shards = ceil(extent.tokens * 2 / SHARD_BYTES)
    sorting = (
        min(extent.workers, segments)
        * rates.sorting
        * documents
        * ENTRY_BYTES
        / segments
    )
    writing = min(extent.workers, shards) * PIECE_BYTES * extent.pieces / max(1, shards)
    tables = ceil(documents / FILE_DOCUMENTS)
    memory = (
        rates.memory
        + max(sorting, writing)
        + RECORD_BYTES * (extent.shards + shards + segments)
    )
    work = (
        documents * (ENTRY_BYTES + CANDIDATE_BYTES + ENTRY_BYTES)
        + extent.pieces * PLACED_BYTES
        + (BATCH_BYTES * (2 * extent.senders * segments + segments * shards))
    )
    opened = (extent.senders * segments * 2 + segments * shards) * OPEN_SECONDS + (
        0 if extent.sends else extent.shards * shards * PART_SECONDS
    )
    return Cost(
        "mix",
        _seconds(rates, extent) + opened,
        memory,
        work,
        _linear(rates.out, extent),
        3 * extent.shards + 4 * segments + 6 * shards + tables,
        segments,
        shards,
    )


def breaks_of(extent: Extent) -> Iterator[str]:
    """Yield the limits reached at this size, with remedies."""
    if (
        extent.keys
        and extent.documents * extent.keys * BYTES_PER_KEY
        > MOST_PARTITIONS * PARTITION_BYTES
    ):
        limit = MOST_PARTITIONS * PARTITION_BYTES / (extent.keys * BYTES_PER_KEY)
        yield (
            f"dedup: above {limit:.1e} documents the {MOST_PARTITIONS:,} partitions of "
            "keys are at their maximum number: each grows, and with it the memory; "
            "fewer bands, or several runs with `against`, need less"
        )
    if (
        extent.documents * extent.kept * ENTRY_BYTES
        > (1 << streams.MOST_PARTITION_BITS) * streams.PARTITION_BYTES
    ):
        limit = (
            (1 << streams.MOST_PARTITION_BITS) * streams.PARTITION_BYTES / ENTRY_BYTES
        )
        yield (
            f"mix: above {limit:.1e} documents the "
            f"{1 << streams.MOST_PARTITION_BITS:,} segments are at their "
            "maximum number: each grows, and with it the memory"
        )
    if extent.shards > MOST_PARTS and not extent.sends:
        yield (
            f"mix: {extent.shards:,} token parts exceed the {MOST_PARTS:,} that a task "
            "maps: every shard of rows opens all of them"
        )
    if not extent.sends:
        cold = extent.documents * extent.kept * ROW_BYTES
        yield (
            f"mix: if the {sized(extent.tokens * 2)} of tokens do not fit into memory, "
            f"a disk page is read for each document, up to {sized(cold)}"
        )
    yield (
        "explain: an id that no mixture knows is searched among all, "
        f"{sized(extent.documents * ID_BYTES)}, for "
        f"about {extent.documents * ID_SECONDS:,.0f} s"
    )
    if extent.shards > MOST_SHARDS:
        yield (
            f"{extent.shards:,} document shards: a folder of so many files is slow to "
            "list, and each job holds a record of each; raise ingest.shard_bytes"
        )


@dataclass(frozen=True)
class Host:
    """A machine: its cores, and bytes of memory and local disk."""

    cores: int
    memory_bytes: float
    disk_bytes: float


HOST = Host(32, 256 * 2**30, 7.5e12)
"""An AWS i4i.8xlarge, or its equivalent at other clouds: 32 virtual cores and two disks
of 3.75 TB.
"""
MOST_DAYS = 7
"""Maximum days of a preparation; longer ones are spread over more hosts."""


@dataclass(frozen=True)
class Proposal:
    """Machines and settings that prepare a corpus within the bounds of a host.

    Attributes:
        hosts: number of hosts; several need `engine.runner: flink` (or Spark).
        workers: workers per host: one per core, or as many as fit into its memory.
        runs: number of successive runs over equal parts (`dedup.against` compares each
            with the earlier ones).
        shard_bytes: `ingest.shard_bytes`.
        shards: number of document shards.
        memory_bytes: memory per host.
        disk_bytes: disk per host.
        days: duration of a run.
        reasons: requirements that exceed one machine; empty if one suffices.
        text: all this in a sentence.
    """

    hosts: int
    workers: int
    shard_bytes: int
    shards: int
    memory_bytes: float
    disk_bytes: float
    days: float
    runs: int = 1
    reasons: tuple[str, ...] = ()
    text: str = ""


def proposal_of(extent: Extent) -> Proposal:
    """Propose one machine if it suffices, else the smallest number of hosts.

    On one machine a task maps at most MOST_PARTS token parts, so shards and memory grow
    with the corpus. Hosts of a cluster are sent their rows instead, so only the number
    of shards is bounded.
    """
    on_one_host = _on_hosts(_with_shards(extent, MOST_PARTS), 1)
    reasons = []
    if on_one_host.shard_bytes > LARGEST_SHARD:
        reasons.append(
            f"shards of {sized(on_one_host.shard_bytes)}, above the "
            f"maximum of {sized(LARGEST_SHARD)}"
        )
    if on_one_host.memory_bytes > HOST.memory_bytes:
        reasons.append(f"{sized(on_one_host.memory_bytes)} of memory")
    if on_one_host.disk_bytes > HOST.disk_bytes:
        reasons.append(f"{sized(on_one_host.disk_bytes)} of disk")
    if on_one_host.days > MOST_DAYS:
        reasons.append(f"{on_one_host.days:,.0f} days")
    if not reasons:
        return on_one_host
    runs = ceil(extent.text_bytes / (MOST_SHARDS * LARGEST_SHARD))
    part = replace(extent, documents=extent.documents / runs, sends=True)
    spread_extent = _with_shards(part, MOST_SHARDS)
    on_one_large_host = _on_hosts(spread_extent, 1)
    hosts = max(
        2,
        ceil(on_one_large_host.disk_bytes / HOST.disk_bytes),
        ceil(on_one_large_host.days / MOST_DAYS),
    )
    return replace(_on_hosts(spread_extent, hosts), runs=runs, reasons=tuple(reasons))


def _with_shards(extent: Extent, max_shards: int) -> Extent:
    """Limit the number of shards by enlarging them to whole megabytes."""
    fewest_bytes = ceil(extent.text_bytes / max_shards / 1e6) * 1_000_000
    return replace(extent, shard_bytes=max(extent.shard_bytes, fewest_bytes))


def _on_hosts(extent: Extent, hosts: int) -> Proposal:
    """Propose one worker per core, halved until they fit into the memory of a host."""
    extent = replace(extent, workers=HOST.cores)
    costs = costs_of(extent)
    while extent.workers > 1 and _most_memory(costs) > HOST.memory_bytes:
        extent = replace(extent, workers=extent.workers // 2)
        costs = costs_of(extent)
    hours = sum(cost.core_seconds for cost in costs) / 3600
    return Proposal(
        hosts,
        extent.workers,
        extent.shard_bytes,
        extent.shards,
        _most_memory(costs),
        _most_disk(costs) / hosts,
        hours / extent.workers / hosts / 24,
    )


def _most_memory(costs: Sequence[Cost]) -> float:
    return max(cost.memory_bytes for cost in costs)


def _most_disk(costs: Sequence[Cost]) -> float:
    """Return the peak of the bytes of earlier outputs plus those of the current
    step.
    """
    outputs, peak = 0.0, 0.0
    for cost in costs:
        peak = max(peak, outputs + cost.work_bytes + cost.out_bytes)
        outputs += cost.out_bytes
    return peak


def described(proposal: Proposal) -> str:
    """Describe the proposal in a sentence or two."""
    machine = (
        f"{HOST.cores} cores, {sized(HOST.memory_bytes)} of memory and "
        f"{sized(HOST.disk_bytes)} of disk"
    )
    settings = (
        f"engine.workers: {proposal.workers}, ingest.shard_bytes: "
        f"{proposal.shard_bytes}"
    )
    requirements = (
        f"{proposal.shards:,} shards, {sized(proposal.memory_bytes)} of memory, "
        f"{sized(proposal.disk_bytes)} of disk"
    )
    if not proposal.reasons:
        return (
            f"one machine of {machine} suffices with {settings}: {requirements}, "
            f"{24 * proposal.days:,.1f} hours"
        )
    runs = f", in {proposal.runs} runs with dedup.against" if proposal.runs > 1 else ""
    return (
        f"one machine of {machine} does not suffice: it would need "
        f"{'; '.join(proposal.reasons)}. {proposal.hosts} of "
        f"them do with engine.runner: flink{runs}, {settings}: {requirements} per "
        f"host, {24 * proposal.days:,.1f} hours per run"
    )


@dataclass(frozen=True)
class ScaleTotals:
    """Cost of all steps.

    Attributes:
        core_hours: of all workers.
        days: on the manifest's workers.
        memory_bytes, disk_bytes: of the largest step.
        files: number of temporary and output files.
        price: US dollars.
    """

    core_hours: float
    days: float
    memory_bytes: float
    disk_bytes: float
    files: int
    price: float


@dataclass(frozen=True)
class ScalePlan:
    """Cost of preparing a number of documents.

    Attributes:
        documents: number of documents.
        text_bytes: bytes of their text.
        steps: cost of each step, in order.
        totals: cost of all steps.
        breaks: limits that it exceeds, in sentences.
        proposal: machines and settings that suffice.
    """

    documents: float
    text_bytes: float
    steps: list[Cost]
    totals: ScaleTotals
    breaks: list[str]
    proposal: Proposal


def plan_at_scale(
    manifest: Manifest,
    documents: Sequence[float],
    document_bytes: float = DOCUMENT_BYTES,
    core_hour: float = CORE_HOUR,
) -> list[ScalePlan]:
    """Compute the cost of each number of documents."""
    plans = []
    for number in documents:
        extent = extent_of(manifest, number, document_bytes)
        costs = costs_of(extent)
        hours = sum(cost.core_seconds for cost in costs) / 3600
        totals = ScaleTotals(
            hours,
            hours / extent.workers / 24,
            _most_memory(costs),
            _most_disk(costs),
            sum(cost.files for cost in costs),
            hours * core_hour,
        )
        proposal = proposal_of(extent)
        plans.append(
            ScalePlan(
                number,
                extent.text_bytes,
                costs,
                totals,
                [*breaks_of(extent)],
                replace(proposal, text=described(proposal)),
            )
        )
    return plans


def print_at_scale(
    session: Session, plans: Sequence[ScalePlan], core_hour: float = CORE_HOUR
) -> None:
    """Print a table for each number of documents, at most 60 columns wide."""
    console, workers = plain_console(), session.manifest.engine.workers
    for plan in plans:
        totals = plan.totals
        heading = (
            f"{plan.documents:,.0f} documents, {sized(plan.text_bytes)} of text, on "
            f"{workers} workers"
        )
        console.print(Text(heading, style="bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("step", no_wrap=True)
        for name in ("core hours", "memory", "working", "output", "files"):
            table.add_column(name, justify="right", no_wrap=True)
        for step in plan.steps:
            table.add_row(
                step.step,
                f"{step.core_seconds / 3600:,.1f}",
                sized(step.memory_bytes),
                sized(step.work_bytes),
                sized(step.out_bytes),
                f"{step.files:,}",
            )
        console.print(table)
        console.print(
            Text(
                f"{totals.core_hours:,.0f} core hours: {totals.days:,.1f} days, "
                f"{totals.price:,.0f} US dollars at {core_hour:g} per core and "
                f"hour; {sized(totals.disk_bytes)} of disk; "
                f"{sized(totals.memory_bytes)} of memory"
            )
        )
        for sentence in plan.breaks:
            console.print(Text(f"- {sentence}", style="yellow"))
        console.print(Text(f"Proposal: {plan.proposal.text}."))
        console.print()


def sized(number: float) -> str:
    """Format bytes in TB, GB or MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e6:.0f} MB"
