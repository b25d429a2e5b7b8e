"""Stage `text_index`: the places of training rows in suffix order, for finding
passages.

    index.json         `shortest_span`, `bits` of a bucket's number, `partitions`,
                       `places`, `dtype` of the files
    places-00000.bin   the places of a partition, by bucket and within it by suffix
                       (`suffixes.py`)
    prints-00000.bin   eight more bits of the hash of each place
    buckets-00000.bin  first place of each of its buckets, and the end of the last

It is a suffix array (Manber & Myers 1993), cut into buckets by the hash of the first
tokens: a passage is found by one lookup of its bucket and a search in it, with all its
places. The search is exact: it finds the longest passage from any token on. A place is
row x L + start; passages never cross the end of a row or of a document's piece, since
training sees none that do.

A question that finds the index on the disk reads two pages for each token of the text,
of `buckets` and `prints`; the prints pass one in thirty absent n-grams. For each
remaining candidate it reads a page of `places` and one of the rows. All pages of a kind
are prefetched at once, without their neighbours: page faults are sequential, and each
reads 128 KiB.

Two jobs. `grams` goes over the shards of rows and sends each place to the partition of
its bucket, `sort` orders a partition. A task of the first holds CHUNK_TOKENS places at
a time (100 MB), one of the second 4 bytes, or 8 beyond 2^32 tokens, and one for its
print, for each place of a partition, 28 for each bucket, and 20 or 24 for each place of
its largest bucket: 120 MB, or 200 MB, where no n-gram comes millions of times. Rows are
mapped beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.files import atomic_write, read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.runners.shuffle import (
    Sending,
    Sent,
    Shuffled,
    run_stream,
)
from gristmill.dataprep.runners.tasks import Done, Task, partition_tasks, run_tasks
from gristmill.dataprep.shuffle_format import count_partitions
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import expect_far_reads, read_ahead, read_tokens
from gristmill.tokenize.suffixes import (
    MappedRows,
    deal_out,
    find_longest,
    hash_text,
    keep_alike,
    list_places,
    sort_buckets,
)

HEADER, FORMAT = "index.json", 2
KINDS = ("places", "prints", "buckets")
"""Files of a partition: its places, their prints, and the starts of its buckets."""
GRAMS = "grams"
CHUNK_TOKENS = 1_000_000
PLACE_BYTES = 12
"""Bytes of a place sent to its partition, with its bucket."""
BUCKET_PLACES = 8
"""Average places per bucket: few enough that searching costs no more than the
lookup.
"""
MOST_BITS = 32
MOST_PRINTS = 4096
"""Largest bucket whose prints are read: larger ones hold frequent n-grams and are
searched directly.
"""
MOST_ROWS = 16
"""Most places of a range whose rows are prefetched: a search of a longer range reads few
of them, which are not known in advance.
"""
AHEAD_TOKENS = 64
"""Tokens of a passage that are prefetched: nearly always in the page in which it begins.
"""


@dataclass(frozen=True)
class Plan:
    """Common settings of the stage's tasks.

    Attributes:
        packed: the set.
        shortest: tokens of the shortest passage.
        bits: of a bucket's number.
        partition_bits: leading bits of it that number the partition.
        dtype: of places, little-endian.
        out: output folder.
    """

    packed: PackedSet
    shortest: int
    bits: int
    partition_bits: int
    dtype: np.dtype
    out: Path


def map_rows(packed: PackedSet) -> MappedRows:
    """Map the training rows of a set; those in an object store are copied to the local
    disk.
    """
    return MappedRows(
        packed.open_training(compare=False), packed.sequence_length, packed.dtype
    )


class IndexRecipe(TypedDict):
    """Recipe of the stage."""

    shortest_span: int
    """Tokens of the shortest passage."""


@dataclass(frozen=True)
class IndexSummary:
    """Number of places in the index, and of its partitions."""

    places: int
    partitions: int


def run(
    inputs: Inputs, config: IndexRecipe, out: Path, context: Context
) -> IndexSummary:
    """Index the training rows of a packed set; the module lists the files.

    Args:
        inputs: `mix`.
        config: settings.
        out: output folder.
        context: where to run.
    """
    packed = PackedSet(inputs["mix"])
    tokens = packed.rows * packed.sequence_length
    partition_bits = (count_partitions(tokens * PLACE_BYTES) - 1).bit_length()
    bits = min(max((tokens // BUCKET_PLACES).bit_length(), partition_bits), MOST_BITS)
    name = "uint32" if tokens < 1 << 32 else "uint64"
    plan = Plan(
        packed,
        config["shortest_span"],
        bits,
        partition_bits,
        np.dtype(name).newbyteorder("<"),
        out,
    )
    partitions = 1 << partition_bits
    tasks = []
    first = 0
    for shard in packed.shards:
        last = first + shard["rows"]
        tasks.append(
            Task(
                shard["file"].removesuffix(".bin"),
                {"first": first, "last": last},
                shard["rows"] * packed.sequence_length * packed.dtype.itemsize,
            )
        )
        first = last
    _, sent = run_stream(
        GRAMS, tasks, partial(send_places, plan=plan), context, partitions
    )
    sorted_ = run_tasks(
        "sort",
        partition_tasks(partitions),
        partial(sort_partition, plan=plan, sent=sent),
        context,
    )
    places = sum(result["places"] for result in sorted_)
    write_json(
        out / HEADER,
        {
            "format": FORMAT,
            "shortest_span": plan.shortest,
            "bits": bits,
            "partitions": partitions,
            "places": places,
            "dtype": name,
        },
    )
    return IndexSummary(places, partitions)


def send_places(task: Task, plan: Plan) -> Sending:
    """Send every possible start of a passage in a shard to the partition of its
    bucket.
    """
    mapped = map_rows(plan.packed)
    length = plan.packed.sequence_length
    first = task.payload["first"]
    last = task.payload["last"]
    at_a_time = max(1, CHUNK_TOKENS // length)
    for begin in range(first, last, at_a_time):
        end = min(begin + at_a_time, last)
        withheld = np.isin(np.arange(begin, end), plan.packed.withheld)
        buckets = np.empty((end - begin) * length, np.uint32)
        places = np.empty((end - begin) * length, plan.dtype)
        number = list_places(
            begin, end, withheld, plan.shortest, plan.bits, mapped.rows, buckets, places
        )
        partitions = (
            buckets[:number] >> np.uint32(plan.bits - plan.partition_bits)
        ).astype(np.int64)
        yield Sent(
            GRAMS,
            pa.table({"bucket": buckets[:number], "place": places[:number]}),
            partitions,
        )
    return Done()


def sort_partition(task: Task, plan: Plan, sent: Shuffled) -> Done:
    """Write the sorted places of a partition and the starts of its buckets."""
    partition = task.payload["partition"]
    size = 1 << (plan.bits - plan.partition_bits)
    first = partition * size
    counts = np.zeros(size + 1, np.int64)
    if not sent.is_nothing:
        for piece in sent.pieces(partition):
            # `bincount` would make an array of all buckets for every small piece.
            buckets = piece["bucket"].to_numpy().astype(np.int64) - first
            np.add.at(counts[1:], buckets, 1)
    starts = np.cumsum(counts)
    places = np.empty(starts[-1], plan.dtype)
    prints = np.empty(starts[-1], np.uint8)
    if len(places):
        filled = starts[:-1].copy()
        for piece in sent.pieces(partition):
            deal_out(
                piece["bucket"].to_numpy(),
                piece["place"].to_numpy(),
                first,
                filled,
                places,
            )
        spare = np.empty(int(counts.max()), plan.dtype)
        # It must outlive the kernel: its rows are addresses.
        mapped = map_rows(plan.packed)
        sort_buckets(places, starts, plan.shortest, mapped.rows, spare, prints)
    files = [plan.out / file_name(kind, partition) for kind in KINDS]
    for path, content in zip(
        files, (places, prints, starts.astype(plan.dtype)), strict=True
    ):
        with atomic_write(path) as sink:
            sink.write(content.data.cast("B") if len(content) else b"")
    return Done(files, {"places": len(places)})


def file_name(kind: str, partition: int) -> str:
    """Name of a partition's file of KINDS."""
    return f"{kind}-{partition:05d}.bin"


@dataclass(frozen=True)
class Passage:
    """Part of a text that occurs in training rows.

    Attributes:
        begin, tokens: its first token in the text and its length.
        places: its occurrences, row x L + start, in no particular order.
    """

    begin: int
    tokens: int
    places: np.ndarray


class Partition(NamedTuple):
    """Mapped files of a partition."""

    places: np.ndarray
    prints: np.ndarray
    starts: np.ndarray


class Part(NamedTuple):
    """Candidates of a text's n-grams in one partition.

    Attributes:
        partition: that may hold them.
        begins: int64 (k,), places in the text.
        firsts, lasts: int64 (k,), range of the partition that may hold the n-gram at
            each place.
    """

    partition: Partition
    begins: np.ndarray
    firsts: np.ndarray
    lasts: np.ndarray

    def within(self, most: int) -> np.ndarray:
        """Mask of the ranges with at most so many places."""
        return self.lasts - self.firsts <= most


class OpenIndex:
    """An index and the rows that it is of, mapped.

    Args:
        folder: of the index.
        packed: the set that it was made of.

    Attributes:
        shortest: tokens of the shortest passage.
    """

    def __init__(self, folder: Path, packed: PackedSet) -> None:
        header = read_json(folder / HEADER)
        self.shortest: int = header["shortest_span"]
        self._bits: int = header["bits"]
        self._per_partition = (1 << self._bits) // header["partitions"]
        self._dtype = np.dtype(header["dtype"]).newbyteorder("<")
        self._folder = folder
        self._rows = map_rows(packed)
        self._rows.expect_far_reads()
        self._open: dict[int, Partition] = {}

    def passages(self, ids: np.ndarray) -> list[Passage]:
        """Maximal passages of a text that occur in the rows, in the order of the text.

        Args:
            ids: its tokens, integers of shape (size,).
        """
        text = np.ascontiguousarray(ids, self._rows.dtype)
        size, shortest = len(text), self.shortest
        if size < shortest:
            return []
        rows = self._rows.rows
        address = np.uint64(text.ctypes.data)
        buckets = np.empty(size - shortest + 1, np.int64)
        prints = np.empty(len(buckets), np.uint8)
        hash_text(address, size, shortest, self._bits, rows.wide, buckets, prints)
        owners = buckets // self._per_partition
        matches = np.zeros((len(buckets), 3), np.int64)
        for partition, begins, firsts, lasts in self._look_ahead(
            owners, buckets, prints
        ):
            some = np.zeros((len(begins), 3), np.int64)
            find_longest(
                address,
                size,
                begins,
                firsts,
                lasts,
                partition.places,
                shortest,
                rows,
                some,
            )
            matches[begins] = some
        lengths = matches[:, 0]
        # A passage that the token before it belongs to is a part of the one from there
        # on.
        before = np.concatenate([[0], lengths[:-1]])
        longest = np.flatnonzero((lengths > 0) & (before != lengths + 1))
        passages = []
        for begin in longest.tolist():
            tokens, first, last = matches[begin].tolist()
            places = self._partition(int(owners[begin])).places[first:last]
            passages.append(Passage(begin, tokens, places))
        return passages

    def _look_ahead(
        self, owners: np.ndarray, buckets: np.ndarray, prints: np.ndarray
    ) -> list[Part]:
        """Candidate ranges of a text's n-grams, being prefetched; n-grams without
        candidates are left out.
        """
        looked_up = []
        for number in np.unique(owners).tolist():
            begins = np.flatnonzero(owners == number)
            slots = buckets[begins] - number * self._per_partition
            partition = self._partition(number)
            read_ahead(partition.starts, slots, slots + 2)
            looked_up.append((partition, begins, slots))
        parts = [
            Part(
                partition,
                begins,
                partition.starts[slots].astype(np.int64),
                partition.starts[slots + 1].astype(np.int64),
            )
            for partition, begins, slots in looked_up
        ]
        for part in parts:
            short = part.within(MOST_PRINTS)
            read_ahead(part.partition.prints, part.firsts[short], part.lasts[short])
        candidates = []
        for partition, begins, firsts, lasts in parts:
            keep_alike(partition.prints, prints[begins], MOST_PRINTS, firsts, lasts)
            there = lasts > firsts
            if there.any():
                part = Part(partition, begins[there], firsts[there], lasts[there])
                candidates.append(part)
                ends = np.minimum(part.lasts, part.firsts + MOST_PRINTS)
                read_ahead(partition.places, part.firsts, ends)
        places = []
        for part in candidates:
            some = part.within(MOST_ROWS)
            ranges = map(range, part.firsts[some].tolist(), part.lasts[some].tolist())
            indices = np.array([*chain.from_iterable(ranges)], np.int64)
            places.append(part.partition.places[indices].astype(np.int64))
        if places:
            self._rows.read_ahead(np.concatenate(places), AHEAD_TOKENS)
        return candidates

    def _partition(self, number: int) -> Partition:
        if number not in self._open:
            dtypes = (self._dtype, np.dtype(np.uint8), self._dtype)
            self._open[number] = Partition(
                *(
                    read_tokens(self._folder / file_name(kind, number), dtype)
                    for kind, dtype in zip(KINDS, dtypes, strict=True)
                )
            )
            for array in self._open[number]:
                expect_far_reads(array)
        return self._open[number]
