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

from gristmill.dataprep.dedup.dedup_keys import BYTES_PER_KEY, keys_per_document
from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.shuffle_format import (
    MOST_PARTITIONS,
    PARTITION_BYTES,
    count_partitions,
)
from gristmill.flows.pages.page_elements import table
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.planning.quantities import size
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.tokenize.mixing import streams
from gristmill.tokenize.mixing.candidates import CANDIDATE_BYTES
from gristmill.tokenize.mixing.ledger import FILE_DOCUMENTS
from gristmill.tokenize.mixing.mix import SHARD_BYTES
from gristmill.tokenize.mixing.streams import ENTRY_BYTES, partition_bits
from gristmill.tokenize.packing.row_layout import PLACED_BYTES
from gristmill.tokenize.packing.write_shards import MOST_PARTS, PIECE_BYTES

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
            (`runners/shuffle.py: must_send`).
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


def extent_of(manifest: Manifest, documents: float, document_bytes: float) -> Extent:
    """Return the extent of a corpus prepared by a manifest."""
    sections = (step.config for step in manifest.prepare)
    dedup = next((section for section in sections if isinstance(section, Dedup)), None)
    return Extent(
        documents,
        document_bytes,
        shard_bytes=manifest.ingest.shard_bytes,
        workers=manifest.engine.workers,
        keys=keys_per_document(dedup) if dedup else 0,
        sequence_length=manifest.mix.sequence_length if manifest.mix else 2048,
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
    costs = [_cost("ingest", extent, files=2 * extent.shards)]
    if extent.keys:
        rates = RATES["dedup"]
        key_bytes = extent.documents * extent.keys * BYTES_PER_KEY
        partitions = count_partitions(int(key_bytes))
        pieces = extent.senders * partitions
        dedup = _cost(
            "dedup",
            extent,
            files=6 * extent.shards + 7 * partitions,
            partitions=partitions,
            seconds=pieces * OPEN_SECONDS,
            memory=extent.workers * rates.sorting * key_bytes / partitions,
            work=_linear(rates.work, extent) + BATCH_BYTES * pieces,
        )
        costs.append(dedup)
    costs.append(_cost("tokenize", extent, files=4 * extent.shards))
    documents = extent.documents * extent.kept
    segments = 1 << partition_bits(int(documents), ENTRY_BYTES)
    shards = ceil(extent.tokens * 2 / SHARD_BYTES)
    segment_bytes = RATES["mix"].sorting * documents * ENTRY_BYTES / segments
    sorting = min(extent.workers, segments) * segment_bytes
    writing = min(extent.workers, shards) * PIECE_BYTES * extent.pieces / max(1, shards)
    tables = ceil(documents / FILE_DOCUMENTS)
    opened = 2 * extent.senders * segments + segments * shards
    mapped = 0 if extent.sends else extent.shards * shards
    mix = _cost(
        "mix",
        extent,
        files=3 * extent.shards + 4 * segments + 6 * shards + tables,
        partitions=segments,
        seconds=opened * OPEN_SECONDS + mapped * PART_SECONDS,
        memory=max(sorting, writing) + RECORD_BYTES * (shards + segments),
        work=documents * (ENTRY_BYTES + CANDIDATE_BYTES + ENTRY_BYTES)
        + extent.pieces * PLACED_BYTES
        + BATCH_BYTES * opened,
        row_shards=shards,
    )
    return [*costs, mix]


def _linear(per_document_and_byte: tuple[float, float], extent: Extent) -> float:
    per_document, per_byte = per_document_and_byte
    return extent.documents * (per_document + per_byte * extent.document_bytes)


def _cost(
    step: str,
    extent: Extent,
    files: int,
    partitions: int = 1,
    seconds: float = 0.0,
    memory: float = 0.0,
    work: float = 0,
    row_shards: int = 0,
) -> Cost:
    """Return the cost of a step: `seconds` and `memory` are what it needs besides its
    documents.

    The memory is that of all workers, each with one shard, and of the parent process,
    with a record per task.
    """
    rates = RATES[step]
    shard = rates.shards * min(extent.shard_bytes, extent.text_bytes)
    processes = 1 + (extent.workers if rates.processes else 0)
    return Cost(
        step,
        rates.start + _linear(rates.seconds, extent) + seconds,
        rates.memory * processes
        + min(extent.workers, extent.shards) * shard
        + RECORD_BYTES * extent.shards
        + memory,
        work,
        _linear(rates.out, extent),
        files,
        partitions,
        row_shards,
    )


def breaks_of(extent: Extent) -> Iterator[str]:
    """Yield the limits reached at this size, with remedies."""
    documents = extent.documents * extent.kept
    if extent.keys:
        limit = MOST_PARTITIONS * PARTITION_BYTES / (extent.keys * BYTES_PER_KEY)
        if extent.documents > limit:
            yield (
                f"dedup: above {limit:.1e} documents the {MOST_PARTITIONS:,} partitions "
                "of keys are at their maximum number: each grows, and with it the "
                "memory; fewer bands, or several runs with `against`, need less"
            )
    segments = 1 << streams.MOST_PARTITION_BITS
    limit = segments * streams.PARTITION_BYTES / ENTRY_BYTES
    if documents > limit:
        yield (
            f"mix: above {limit:.1e} documents the {segments:,} segments are at their "
            "maximum number: each grows, and with it the memory"
        )
    if extent.shards > MOST_PARTS and not extent.sends:
        yield (
            f"mix: {extent.shards:,} token parts exceed the {MOST_PARTS:,} that a task "
            "maps: every shard of rows opens all of them"
        )
    if not extent.sends:
        yield (
            f"mix: if the {size(extent.tokens * 2)} of tokens do not fit into memory, "
            f"a disk page is read for each document, up to {size(documents * ROW_BYTES)}"
        )
    yield (
        "explain: an id that no mixture knows is searched among all, "
        f"{size(extent.documents * ID_BYTES)}, for "
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
    single = _on_hosts(_with_shards(extent, MOST_PARTS), 1)
    needs = {
        f"shards of {size(single.shard_bytes)}, above the maximum of "
        f"{size(LARGEST_SHARD)}": single.shard_bytes > LARGEST_SHARD,
        f"{size(single.memory_bytes)} of memory": single.memory_bytes
        > HOST.memory_bytes,
        f"{size(single.disk_bytes)} of disk": single.disk_bytes > HOST.disk_bytes,
        f"{single.days:,.0f} days": single.days > MOST_DAYS,
    }
    reasons = tuple(need for need, is_exceeded in needs.items() if is_exceeded)
    if not reasons:
        return single
    runs = ceil(extent.text_bytes / (MOST_SHARDS * LARGEST_SHARD))
    part = replace(extent, documents=extent.documents / runs, sends=True)
    spread_extent = _with_shards(part, MOST_SHARDS)
    large = _on_hosts(spread_extent, 1)
    hosts = max(
        2, ceil(large.disk_bytes / HOST.disk_bytes), ceil(large.days / MOST_DAYS)
    )
    return replace(_on_hosts(spread_extent, hosts), runs=runs, reasons=reasons)


def _with_shards(extent: Extent, max_shards: int) -> Extent:
    """Limit the number of shards by enlarging them to whole megabytes."""
    fewest_bytes = ceil(extent.text_bytes / max_shards / 1e6) * 1_000_000
    return replace(extent, shard_bytes=max(extent.shard_bytes, fewest_bytes))


def _on_hosts(extent: Extent, hosts: int) -> Proposal:
    """Propose one worker per core, halved until they fit into the memory of a host."""
    extent = replace(extent, workers=HOST.cores)
    totals = _totals(extent, costs_of(extent), 0.0)
    while extent.workers > 1 and totals.memory_bytes > HOST.memory_bytes:
        extent = replace(extent, workers=extent.workers // 2)
        totals = _totals(extent, costs_of(extent), 0.0)
    return Proposal(
        hosts,
        extent.workers,
        extent.shard_bytes,
        extent.shards,
        totals.memory_bytes,
        totals.disk_bytes / hosts,
        totals.days / hosts,
    )


def described(proposal: Proposal) -> str:
    """Describe the proposal in a sentence or two."""
    machine = (
        f"{HOST.cores} cores, {size(HOST.memory_bytes)} of memory and "
        f"{size(HOST.disk_bytes)} of disk"
    )
    settings = (
        f"engine.workers: {proposal.workers}, ingest.shard_bytes: "
        f"{proposal.shard_bytes}: {proposal.shards:,} shards, "
        f"{size(proposal.memory_bytes)} of memory, {size(proposal.disk_bytes)} of disk"
    )
    hours = f"{24 * proposal.days:,.1f} hours"
    if not proposal.reasons:
        return f"one machine of {machine} suffices with {settings}, {hours}"
    runs = f", in {proposal.runs} runs with dedup.against" if proposal.runs > 1 else ""
    return (
        f"one machine of {machine} does not suffice: it would need "
        f"{'; '.join(proposal.reasons)}. {proposal.hosts} of them do with "
        f"engine.runner: flink{runs}, {settings} per host, {hours} per run"
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


def _totals(extent: Extent, costs: Sequence[Cost], core_hour: float) -> ScaleTotals:
    """Add up the costs; the disk holds the outputs of earlier steps beside the current
    step's files.
    """
    hours = sum(cost.core_seconds for cost in costs) / 3600
    outputs = disk = 0.0
    for cost in costs:
        disk = max(disk, outputs + cost.work_bytes + cost.out_bytes)
        outputs += cost.out_bytes
    return ScaleTotals(
        hours,
        hours / extent.workers / 24,
        max(cost.memory_bytes for cost in costs),
        disk,
        sum(cost.files for cost in costs),
        hours * core_hour,
    )


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
        proposal = proposal_of(extent)
        plans.append(
            ScalePlan(
                number,
                extent.text_bytes,
                costs,
                _totals(extent, costs, core_hour),
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
        console.print(
            f"{plan.documents:,.0f} documents, {size(plan.text_bytes)} of text, on "
            f"{workers} workers",
            style="bold",
        )
        rows = [
            (
                step.step,
                step.core_seconds / 3600,
                size(step.memory_bytes),
                size(step.work_bytes),
                size(step.out_bytes),
                step.files,
            )
            for step in plan.steps
        ]
        columns = {"step": "", "core hours": ",.1f", "memory": ">"}
        columns |= {"working": ">", "output": ">", "files": ","}
        print_table(console, table(columns, rows))
        console.print(
            f"{totals.core_hours:,.0f} core hours: {totals.days:,.1f} days, "
            f"{totals.price:,.0f} US dollars at {core_hour:g} per core and hour; "
            f"{size(totals.disk_bytes)} of disk; {size(totals.memory_bytes)} of memory"
        )
        for sentence in plan.breaks:
            console.print(f"- {sentence}", style="yellow")
        console.print(f"Proposal: {plan.proposal.text}.\n")
