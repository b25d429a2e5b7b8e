"""`gristmill plan MANIFEST --documents 1e9`: what preparing and mixing so many takes, what grows, where it breaks.

`predict.py` runs samples of a manifest's own sources; this is arithmetic, for corpora that nobody has at hand. How much
a step computes and writes is so much for each document and each byte of text (RATES, measured by `gristmill bench
bounds` at 200 and at 1,000 bytes a document). What a process holds, and into how many files and partitions the work is
cut, follows from the constants of the steps themselves. So the answer says too where one of these stops keeping up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from rich.table import Table
from rich.text import Text

from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.duplicates.dedup_keys import BYTES_PER_KEY, keys_per_document
from gristmill.dataprep.shuffle_format import MOST_PARTITIONS, PARTITION_BYTES, count_partitions
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
"""US dollars: about what a virtual core of a machine for general use is rented for, on demand, at the large clouds."""
DOCUMENT_BYTES = 3000
"""Mean text of a page of FineWeb: its sample of 10 billion tokens has 14.9 million pages (Penedo et al. 2024)."""
TOKEN_BYTES = 4.5
"""Text bytes per token of English with a vocabulary of 32,000 or more."""
RECORD_BYTES = 1500
"""What the process that starts a job holds of each task: its name, payload and result."""
OPEN_SECONDS, BATCH_BYTES = 45e-6, 465
"""To open one of the files that a partition is read from; what such a file has of each partition besides its rows."""
PART_SECONDS = 20e-6
"""To open and map a token part, which every shard of rows does with all of them."""
ID_SECONDS = 40e-9
"""To look at a document's id, where one is sought that no mixture knows (`row_groups.find_ids`)."""
ROW_BYTES = 4096
"""A page of the disk: what is read for a document's tokens where the token parts are not in memory."""


MOST_SHARDS = 100_000
"""Document shards: a folder of more files is slow to list."""


LARGEST_SHARD = 2_000_000_000
"""Bytes of text: a string column of Arrow addresses 2 GiB."""


@dataclass(frozen=True)
class Rates:
    """What a step takes for each document that it reads, and for each byte of its text.

    Attributes:
        start: seconds of one core, however many documents there are.
        seconds: of one core, per document and per byte.
        work: bytes on the disk while it works, per document and per byte.
        out: bytes of its output, per document and per byte.
        memory: bytes that a process holds besides its data: libraries, kernels, batches.
        shards: what a worker holds of a document shard, in times the size of its text.
        sorting: what it holds of a partition while it sorts it, in times its size.
        processes: whether its workers are processes.
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
    "ingest": Rates(2.3, (2.3e-6, 6.6e-9), (0, 0), (24, 0.38), 145e6, shards=5, processes=True),
    "dedup": Rates(4.0, (8.6e-6, 18.7e-9), (748, 0.59), (169, 0.51), 457e6, sorting=2.1),
    "tokenize": Rates(2.5, (0.5e-6, 13e-9), (0, 0), (20, 0.46), 240e6, shards=8),
    "mix": Rates(2.5, (2.6e-6, 0.8e-9), (0, 0), (50, 0.46), 290e6, sorting=7),
}
"""Measured on two cores that others used too. What `mix` leaves on the disk while it works is counted row by row."""


@dataclass(frozen=True)
class Extent:
    """A corpus, and how it is prepared.

    Attributes:
        documents: how many are read.
        document_bytes: mean text of each.
        kept: share of them that is left to be mixed.
        shard_bytes: text of a document shard (`ingest.shard_bytes`).
        workers: at the same time.
        keys: of a document, for `dedup`.
        sequence_length: of a row.
        shuffle: by files, of which a partition is read from all, or by the engine, which leaves one (`engine.shuffle`).
        sends: whether tasks are sent what they would look up in files of others (`jobs/shuffled.py: must_send`).
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
        """Of all documents."""
        return self.documents * self.document_bytes

    @property
    def shards(self) -> int:
        """Document shards."""
        return ceil(self.text_bytes / self.shard_bytes)

    @property
    def senders(self) -> int:
        """Files that a partition is read from."""
        return self.shards if self.shuffle == "files" else 1

    @property
    def tokens(self) -> float:
        """Of the documents that are kept, ends of text counted."""
        return self.documents * self.kept * (self.document_bytes / TOKEN_BYTES + 1)

    @property
    def pieces(self) -> float:
        """Parts of documents in rows: a document is cut once for each row that ends within it."""
        return self.documents * self.kept + self.tokens / self.sequence_length


def extent_of(manifest: Manifest, documents: float, document_bytes: float = DOCUMENT_BYTES) -> Extent:
    """A corpus of so many documents, prepared as a manifest says."""
    section = next((step.config for step in manifest.prepare if isinstance(step.config, Dedup)), None)
    return Extent(
        documents,
        document_bytes,
        shard_bytes=manifest.ingest.shard_bytes,
        workers=manifest.engine.workers,
        keys=keys_per_document(section) if section is not None else 0,
        sequence_length=manifest.mix.sequence_length if manifest.mix is not None else 2048,
    )


@dataclass(frozen=True)
class Cost:
    """What a step takes.

    Attributes:
        step: its name.
        core_seconds: of processor time, over all workers.
        memory_bytes: of all its processes together, mapped files aside.
        work_bytes: on the disk while it works.
        out_bytes: of its output.
        files: of both.
        partitions: into which it cuts what it sorts; 1 where it sorts nothing.
        row_shards: shards of rows that it writes.
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
    """What each step takes, in their order; `dedup` only where there are keys."""
    found = [_ingest(extent), *([_dedup(extent)] if extent.keys else []), _tokenize(extent), _mix(extent)]
    return found


def _of(pair: tuple[float, float], extent: Extent) -> float:
    return extent.documents * (pair[0] + pair[1] * extent.document_bytes)


def _seconds(rates: Rates, extent: Extent) -> float:
    return rates.start + _of(rates.seconds, extent)


def _shard_memory(rates: Rates, extent: Extent) -> float:
    """Of all workers, each with a shard; and of the process that starts them, with a record of each task."""
    shard = rates.shards * min(extent.shard_bytes, extent.text_bytes)
    processes = extent.workers if rates.processes else 0
    return rates.memory * (1 + processes) + min(extent.workers, extent.shards) * shard + RECORD_BYTES * extent.shards


def _ingest(extent: Extent) -> Cost:
    rates = RATES["ingest"]
    return Cost(
        "ingest", _seconds(rates, extent), _shard_memory(rates, extent), 0, _of(rates.out, extent), 2 * extent.shards, 1
    )


def _dedup(extent: Extent) -> Cost:
    rates, key_bytes = RATES["dedup"], extent.documents * extent.keys * BYTES_PER_KEY
    partitions = count_partitions(int(key_bytes))
    sorting = extent.workers * rates.sorting * key_bytes / partitions
    memory = _shard_memory(rates, extent) + sorting
    opened = extent.senders * partitions * OPEN_SECONDS
    work = _of(rates.work, extent) + BATCH_BYTES * extent.senders * partitions
    return Cost(
        "dedup",
        _seconds(rates, extent) + opened,
        memory,
        work,
        _of(rates.out, extent),
        6 * extent.shards + 7 * partitions,
        partitions,
    )


def _tokenize(extent: Extent) -> Cost:
    rates = RATES["tokenize"]
    return Cost(
        "tokenize",
        _seconds(rates, extent),
        _shard_memory(rates, extent),
        0,
        _of(rates.out, extent),
        4 * extent.shards,
        1,
    )


def _mix(extent: Extent) -> Cost:
    rates, documents = RATES["mix"], extent.documents * extent.kept
    segments = 1 << partition_bits(int(documents), ENTRY_BYTES)
    shards = ceil(extent.tokens * 2 / SHARD_BYTES)
    sorting = min(extent.workers, segments) * rates.sorting * documents * ENTRY_BYTES / segments
    writing = min(extent.workers, shards) * PIECE_BYTES * extent.pieces / max(1, shards)
    tables = ceil(documents / FILE_DOCUMENTS)
    memory = rates.memory + max(sorting, writing) + RECORD_BYTES * (extent.shards + shards + segments)
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
        _of(rates.out, extent),
        3 * extent.shards + 4 * segments + 6 * shards + tables,
        segments,
        shards,
    )


def breaks_of(extent: Extent) -> Iterator[str]:
    """What takes long or no longer keeps up at this size, and what helps."""
    if extent.keys and extent.documents * extent.keys * BYTES_PER_KEY > MOST_PARTITIONS * PARTITION_BYTES:
        limit = MOST_PARTITIONS * PARTITION_BYTES / (extent.keys * BYTES_PER_KEY)
        yield (
            f"dedup: from {limit:.1e} documents on there are no more than {MOST_PARTITIONS:,} partitions of keys: "
            "these grow, and with them its memory; fewer bands, or several runs with `against`, need less"
        )
    if extent.documents * extent.kept * ENTRY_BYTES > (1 << streams.MOST_PARTITION_BITS) * streams.PARTITION_BYTES:
        limit = (1 << streams.MOST_PARTITION_BITS) * streams.PARTITION_BYTES / ENTRY_BYTES
        yield (
            f"mix: from {limit:.1e} documents on there are no more than {1 << streams.MOST_PARTITION_BITS:,} "
            "segments: these grow, and with them its memory"
        )
    if extent.shards > MOST_PARTS and not extent.sends:
        yield (
            f"mix: {extent.shards:,} token parts are more than the {MOST_PARTS:,} that a task maps: every shard of "
            "rows opens all of them"
        )
    if not extent.sends:
        cold = extent.documents * extent.kept * ROW_BYTES
        yield (
            f"mix: where memory has no room for the {sized(extent.tokens * 2)} of tokens, a page of the disk is "
            f"read for each document, up to {sized(cold)}"
        )
    yield (
        f"explain: an id that no mixture knows is sought among all, {sized(extent.documents * ID_BYTES)}, for about "
        f"{extent.documents * ID_SECONDS:,.0f} s"
    )
    if extent.shards > MOST_SHARDS:
        yield (
            f"{extent.shards:,} document shards: a folder of so many files is slow to list, and each job has a "
            "record for each"
        )


@dataclass(frozen=True)
class Host:
    """A machine: its cores, and bytes of memory and of local disk."""

    cores: int
    memory_bytes: float
    disk_bytes: float


HOST = Host(32, 256 * 2**30, 7.5e12)
"""An i4i.8xlarge of AWS, which the other large clouds rent alike: 32 virtual cores and two disks of 3.75 TB."""
MOST_DAYS = 7
"""A preparation that takes longer than a week is spread over more hosts."""


@dataclass(frozen=True)
class Proposal:
    """Machines and settings that prepare a corpus within the bounds of a host.

    Attributes:
        hosts: how many; several need `engine.runner: flink` (or Spark).
        workers: of each host: one a core, or as many as its memory holds.
        runs: one after another, each of an equal part (`dedup.against` compares it with the earlier ones).
        shard_bytes: `ingest.shard_bytes`.
        shards: document shards.
        memory_bytes: that a host holds.
        disk_bytes: that a host needs.
        days: of work in a run.
        reasons: why one machine does not do it, in half sentences; empty if it does.
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


def proposal_of(extent: Extent) -> Proposal:
    """One machine if it does, else as few hosts as do.

    One machine maps at most MOST_PARTS token parts in a task, so its shards grow with the corpus, and with them its
    memory. Hosts of a cluster are sent their rows instead, so there only the number of shards is bounded.
    """
    alone = _on_hosts(_with_shards(extent, MOST_PARTS), 1)
    reasons = _beyond(alone)
    if not reasons:
        return alone
    runs = ceil(extent.text_bytes / (MOST_SHARDS * LARGEST_SHARD))
    part = replace(extent, documents=extent.documents / runs, sends=True)
    spread = _with_shards(part, MOST_SHARDS)
    whole = _on_hosts(spread, 1)
    hosts = max(2, ceil(whole.disk_bytes / HOST.disk_bytes), ceil(whole.days / MOST_DAYS))
    return replace(_on_hosts(spread, hosts), runs=runs, reasons=reasons)


def _with_shards(extent: Extent, most: int) -> Extent:
    """The corpus in at most so many shards of whole megabytes."""
    fewest_bytes = ceil(extent.text_bytes / most / 1e6) * 1_000_000
    return replace(extent, shard_bytes=max(extent.shard_bytes, fewest_bytes))


def _on_hosts(extent: Extent, hosts: int) -> Proposal:
    """With one worker a core, or half as many until the memory of a host holds them."""
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


def _beyond(proposal: Proposal) -> tuple[str, ...]:
    reasons = []
    if proposal.shard_bytes > LARGEST_SHARD:
        reasons.append(f"shards of {sized(proposal.shard_bytes)}, where {sized(LARGEST_SHARD)} is most")
    if proposal.memory_bytes > HOST.memory_bytes:
        reasons.append(f"{sized(proposal.memory_bytes)} of memory")
    if proposal.disk_bytes > HOST.disk_bytes:
        reasons.append(f"{sized(proposal.disk_bytes)} of disk")
    if proposal.days > MOST_DAYS:
        reasons.append(f"{proposal.days:,.0f} days")
    return tuple(reasons)


def _most_memory(costs: Sequence[Cost]) -> float:
    return max(cost.memory_bytes for cost in costs)


def _most_disk(costs: Sequence[Cost]) -> float:
    """Bytes of all outputs so far and of the step that works, where they are most."""
    outputs, most = 0.0, 0.0
    for cost in costs:
        most = max(most, outputs + cost.work_bytes + cost.out_bytes)
        outputs += cost.out_bytes
    return most


def described(proposal: Proposal) -> str:
    """The proposal in a sentence or two."""
    machine = f"{HOST.cores} cores, {sized(HOST.memory_bytes)} of memory and {sized(HOST.disk_bytes)} of disk"
    settings = f"engine.workers: {proposal.workers}, ingest.shard_bytes: {proposal.shard_bytes}"
    needs = (
        f"{proposal.shards:,} shards, {sized(proposal.memory_bytes)} of memory, {sized(proposal.disk_bytes)} of disk"
    )
    if not proposal.reasons:
        return f"one machine of {machine} does with {settings}: {needs}, {24 * proposal.days:,.1f} hours"
    runs = f", in {proposal.runs} runs with dedup.against" if proposal.runs > 1 else ""
    return (
        f"one machine of {machine} does not: it would need {'; '.join(proposal.reasons)}. {proposal.hosts} of them do "
        f"with engine.runner: flink{runs}, {settings}: {needs} a host, {24 * proposal.days:,.1f} hours a run"
    )


def plan_at_scale(
    manifest: Manifest, documents: Sequence[float], document_bytes: float = DOCUMENT_BYTES, core_hour: float = CORE_HOUR
) -> list[dict[str, Any]]:
    """What each number of documents takes.

    Returns:
        for each `documents`, `text_bytes`, `steps` (`Cost` as objects), `totals` (`core_hours`, `days` on the
        manifest's workers, `memory_bytes`, `disk_bytes`, `files`, `price` in US dollars), `breaks`, in sentences, and
        `proposal` (`Proposal` as an object, and its `text`).
    """
    plans = []
    for number in documents:
        extent = extent_of(manifest, number, document_bytes)
        costs = costs_of(extent)
        hours = sum(cost.core_seconds for cost in costs) / 3600
        proposal = proposal_of(extent)
        plans.append(
            {
                "documents": number,
                "text_bytes": extent.text_bytes,
                "steps": [vars(cost) for cost in costs],
                "totals": {
                    "core_hours": hours,
                    "days": hours / extent.workers / 24,
                    "memory_bytes": _most_memory(costs),
                    "disk_bytes": _most_disk(costs),
                    "files": sum(cost.files for cost in costs),
                    "price": hours * core_hour,
                },
                "breaks": [*breaks_of(extent)],
                "proposal": {**vars(proposal), "text": described(proposal)},
            }
        )
    return plans


def print_at_scale(session: Session, found: Sequence[Mapping[str, Any]], core_hour: float = CORE_HOUR) -> None:
    """Print a table for each number of documents; it fits 60 columns."""
    console, workers = plain_console(), session.manifest.engine.workers
    for one in found:
        totals = one["totals"]
        text = sized(one["text_bytes"])
        console.print(Text(f"{one['documents']:,.0f} documents, {text} of text, on {workers} workers", style="bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("step", no_wrap=True)
        for name in ("core hours", "memory", "working", "output", "files"):
            table.add_column(name, justify="right", no_wrap=True)
        for step in one["steps"]:
            table.add_row(
                step["step"],
                f"{step['core_seconds'] / 3600:,.1f}",
                sized(step["memory_bytes"]),
                sized(step["work_bytes"]),
                sized(step["out_bytes"]),
                f"{step['files']:,}",
            )
        console.print(table)
        console.print(
            Text(
                f"{totals['core_hours']:,.0f} core hours: {totals['days']:,.1f} days, {totals['price']:,.0f} US dollars at "
                f"{core_hour:g} per core and hour; {sized(totals['disk_bytes'])} of disk; "
                f"{sized(totals['memory_bytes'])} of memory"
            )
        )
        for sentence in one["breaks"]:
            console.print(Text(f"- {sentence}", style="yellow"))
        console.print(Text(f"Proposal: {one['proposal']['text']}."))
        console.print()


def sized(number: float) -> str:
    """So many bytes in TB, GB or MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e6:.0f} MB"
