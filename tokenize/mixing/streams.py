"""Streams of a mixture: the documents of every source in drawn order, pass after pass,
cut into segments.

Each source has a stream of training documents and one of held-out documents. A pass is
ordered by draws, which are hashes. The documents whose draws share their leading bits
form a partition: a contiguous run of every stream, sorted by one task. Its output is a
`Segment` with its part of each stream; consecutive segments make up the pass. No
process holds more of a whole pass than the token count of each segment.

A task holds one partition: about PARTITION_BYTES of entries, and three times as much
while sorting them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import offsets_of
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners.shuffle import (
    Sending,
    Sent,
    Shuffled,
    run_stream,
)
from gristmill.dataprep.runners.tasks import Done, Task, partition_tasks, run_tasks
from gristmill.dataprep.shuffle_format import columns_of
from gristmill.tokenize.document_sampling import (
    draw,
    leading,
    ordered_by,
    words_of,
)
from gristmill.tokenize.packing.array_files import load_record, save
from gristmill.tokenize.packing.best_fit import bin_begins, by_bin
from gristmill.tokenize.shuffle import order_key

ENTRIES_SCHEMA = pa.schema(
    [
        ("stream", pa.int32()),
        ("high", pa.uint64()),
        ("low", pa.uint64()),
        ("time", pa.int32()),
        ("part", pa.int32()),
        ("offset", pa.int64()),
        ("tokens", pa.int64()),
    ]
)
"""A document in a pass: its stream, the words of its id, its repeat within the pass
(from 0), and the location of its tokens (number of the token part, first token in it,
number of tokens without the end of text).
"""
ENTRY_BYTES = 44
PARTITION_BYTES = 64_000_000
"""Bytes of entries; a task that places their pieces needs seven times as much, about
450 MB.
"""
MOST_PARTITION_BITS = 12
"""4,096 partitions: with more, every task of the previous job would write parts of a
few kilobytes.
"""
SEGMENTS = "segments"


def stream_of(source: np.ndarray, held_out: np.ndarray, sources: int) -> np.ndarray:
    """Number of each document's stream; the training streams of all sources precede
    their held-out streams.
    """
    return np.where(held_out, source + sources, source)


def partition_bits(rows: int, row_bytes: int) -> int:
    """Number of leading bits that split `rows` rows into partitions of at most about
    PARTITION_BYTES each.
    """
    partitions = -(-rows * row_bytes // PARTITION_BYTES)
    return min(max(0, partitions - 1).bit_length(), MOST_PARTITION_BITS)


@dataclass(frozen=True)
class Draws:
    """Hash keys that order the documents of each stream.

    Attributes:
        sources: number of sources.
        training: key of the training streams, 64 bits; every pass draws again.
        validation: key of the held-out streams.
    """

    sources: int
    training: int
    validation: int

    def partitions(
        self,
        stream: np.ndarray,
        words: np.ndarray,
        time: np.ndarray,
        number: int,
        bits: int,
    ) -> np.ndarray:
        """Partition (int64) of each entry of a pass: the leading `bits` of its draw."""
        if not bits:
            return np.zeros(len(words), np.int64)
        return leading(self.of(stream, words, time, number), bits)

    def of(
        self, stream: np.ndarray, words: np.ndarray, time: np.ndarray, number: int
    ) -> np.ndarray:
        """Draws (uint64) of the entries of a pass; every repeat of a document has its
        own draw.
        """
        draws = np.empty(len(words), np.uint64)
        training = stream < self.sources
        for key, kind_mask in ((self.training, training), (self.validation, ~training)):
            for repeat in range(int(time[kind_mask].max(initial=-1)) + 1):
                mask = kind_mask & (time == repeat)
                parts = (number, repeat) if repeat else (number,)
                # For rows of two numbers, bracket indexing takes five times as long.
                selected_words = words.compress(mask, axis=0)
                draws[mask] = draw(selected_words, order_key(key, "pass", *parts))
        return draws


@dataclass(frozen=True)
class Segment:
    """Part of a pass of every stream, in order.

    Attributes:
        first: int64 of shape (streams + 1,), first entry of each stream.
        words: uint64 of shape (n, 2), ids.
        time: int32 of shape (n,), repeat within the pass.
        part: int32 of shape (n,), number of the token part.
        offset: int64 of shape (n,), first token within the part.
        tokens: int64 of shape (n,), without the end of text.
    """

    first: np.ndarray
    words: np.ndarray
    time: np.ndarray
    part: np.ndarray
    offset: np.ndarray
    tokens: np.ndarray

    def of(self, stream: int) -> Segment:
        """Entries of one stream."""
        begin, end = self.first[stream : stream + 2].tolist()
        return Segment(
            np.array([0, end - begin]),
            *(
                getattr(self, name)[begin:end]
                for name in ("words", "time", "part", "offset", "tokens")
            ),
        )

    def starts(self, base: int) -> np.ndarray:
        """First token of each document in its stream, from `base`, and the end of the
        last: int64 of shape (n + 1,).
        """
        return base + offsets_of(self.tokens + 1)


def sort_segment(
    task: Task, draws: Draws, bits: int, number: int, entries: Shuffled, folder: Path
) -> Done:
    """Sort a partition of a pass: payload `partition`.

    Args:
        bits: leading bits shared by all draws of a partition.
        number: of the pass.
        entries: of the pass.
        folder: of the segments.

    Returns:
        by stream, `entries` and `tokens`, including ends of text.
    """
    partition = task.payload["partition"]
    columns = columns_of(entries.read(partition))
    words = words_of(columns)
    stream = columns["stream"]
    time = columns["time"]
    # Shift out the shared bits, so that the remaining ones spread over 64 bits again.
    keys = draws.of(stream, words, time, number)
    keys <<= np.uint64(bits)
    first = bin_begins(stream, 2 * draws.sources)
    order = by_bin(stream, first)
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        stream_order = order[begin:end]
        order[begin:end] = stream_order[
            ordered_by(
                keys[stream_order],
                columns["high"],
                columns["low"],
                time,
                rows=stream_order,
            )
        ]
    tokens = columns["tokens"][order]
    token_starts = offsets_of(tokens + 1)
    segment = Segment(
        first,
        words.take(order, axis=0),
        time[order],
        columns["part"][order],
        columns["offset"][order],
        tokens,
    )
    path = save(folder, segment_name(number, partition), segment)
    return Done(
        [path],
        {
            "entries": np.diff(first).tolist(),
            "tokens": np.diff(token_starts[first]).tolist(),
        },
    )


def segment_name(number: int, partition: int) -> str:
    """File name of a partition of a pass."""
    return f"{number:05d}-{partition:05d}"


def draw_again(
    task: Task,
    draws: Draws,
    bits: int,
    number: int,
    streams: Sequence[int],
    folder: Path,
) -> Sending:
    """Send the documents of a partition of the first pass to the partitions of another
    pass: payload `partition`.

    Args:
        bits, folder: see `sort_segment`.
        number: of the other pass.
        streams: those that need it.
    """
    first = load_record(folder, segment_name(0, task.payload["partition"]), Segment)
    stream = np.repeat(np.arange(len(first.first) - 1), np.diff(first.first))
    is_sent = np.isin(stream, streams)
    arrays = [
        column[is_sent]
        for column in (
            stream.astype(np.int32),
            *first.words.T,
            first.time,
            first.part,
            first.offset,
            first.tokens,
        )
    ]
    table = pa.table(arrays, schema=ENTRIES_SCHEMA)
    columns = columns_of(table)
    partitions = draws.partitions(
        columns["stream"], words_of(columns), columns["time"], number, bits
    )
    yield Sent(pass_job(number), table, partitions)
    return Done()


def pass_job(number: int) -> str:
    """Name of the job that draws the documents of a pass again, and of its shuffled
    output.
    """
    return f"pass-{number}"


@dataclass(frozen=True)
class Bases:
    """Sizes and first tokens of the segments in their streams.

    Attributes:
        tokens: int64 of shape (passes, partitions, streams), tokens of a segment,
            including ends of text.
        entries: the same, documents.
        begins: the same, first token in the stream.
    """

    tokens: np.ndarray
    entries: np.ndarray
    begins: np.ndarray


@dataclass(frozen=True)
class Streams:
    """Segments of all passes drawn so far.

    Attributes:
        work: work folder of the stage, which contains the folder of the segments.
        bits: leading bits of a draw that number its partition.
        draws: order of the streams.
        bases: sizes and first tokens of the segments.
    """

    work: Path
    bits: int
    draws: Draws
    bases: Bases

    @property
    def folder(self) -> Path:
        """Folder of the segments."""
        return self.work / SEGMENTS

    @property
    def passes(self) -> int:
        """Number of passes."""
        return len(self.bases.tokens)

    def tokens(self, stream: int) -> int:
        """Tokens of all passes of a stream."""
        return int(self.bases.tokens[:, :, stream].sum())

    def places(self, stream: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Pass, partition and first token of each non-empty segment of a stream that
        begins before `end`.
        """
        for number, partition in np.argwhere(
            self.bases.entries[:, :, stream] > 0
        ).tolist():
            base = int(self.bases.begins[number, partition, stream])
            if base >= end:
                return
            yield number, partition, base

    def segment(self, number: int, partition: int) -> Segment:
        """Load one segment."""
        return load_record(self.folder, segment_name(number, partition), Segment)


def make_streams(
    entries: Shuffled, work: Path, bits: int, draws: Draws, context: Context
) -> Streams:
    """Sort the first pass.

    Args:
        entries: of ENTRIES_SCHEMA, cut into partitions by the first `bits` bits of the
            draws.
        work: the stage's work folder.
    """
    none = np.empty((0, 1 << bits, 2 * draws.sources), np.int64)
    streams = Streams(work, bits, draws, Bases(none, none, none))
    return _with_pass(streams, entries, context)


def add_pass(streams: Streams, wanted: Sequence[int], context: Context) -> Streams:
    """Streams with one more pass of some of them."""
    again = partial(
        draw_again,
        draws=streams.draws,
        bits=streams.bits,
        number=streams.passes,
        streams=tuple(wanted),
        folder=streams.folder,
    )
    job, partitions = pass_job(streams.passes), 1 << streams.bits
    _, entries = run_stream(
        job, partition_tasks(partitions), again, context, partitions
    )
    return _with_pass(streams, entries, context)


def _with_pass(streams: Streams, entries: Shuffled, context: Context) -> Streams:
    """Streams with one more pass, sorted from its entries."""
    number = streams.passes
    sort = partial(
        sort_segment,
        draws=streams.draws,
        bits=streams.bits,
        number=number,
        entries=entries,
        folder=streams.folder,
    )
    tasks = partition_tasks(1 << streams.bits)
    results = run_tasks(f"sort-{number}", tasks, sort, context)
    tokens, counts = (
        np.concatenate([before, [[result[name] for result in results]]])
        for name, before in (
            ("tokens", streams.bases.tokens),
            ("entries", streams.bases.entries),
        )
    )
    flat = tokens.reshape(-1, tokens.shape[-1])
    begins = (np.cumsum(flat, axis=0) - flat).reshape(tokens.shape)
    return replace(streams, bases=Bases(tokens, counts, begins))
