"""The streams of a mixture: the documents of every source in drawn order, pass after pass, cut into segments.

The training documents of each source are a stream, and so are those that it holds out. A pass is ordered by draws,
which are hashes, so that the documents whose draw begins with the same bits are a run of every stream: a partition,
which one task sorts. What it leaves, a `Segment`, has its part of each stream; segment after segment is the pass. No
process knows more of a whole pass than how many tokens each segment has.

A task holds a partition: about PARTITION_BYTES of entries, and three times as much while it sorts them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import as_path
from gristmill.dataprep.jobs.engine import Done, Task, partition_tasks, run_tasks
from gristmill.dataprep.jobs.shuffled import Sent, Shuffled, run_shuffle
from gristmill.tokenize.document_sampling import draw, ordered_by
from gristmill.tokenize.mixing.best_fit import by_bin
from gristmill.tokenize.mixing.plan_files import load_record, save
from gristmill.tokenize.order import order_key

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
"""A document in a pass: its stream, the words of its id, which time in the pass it is (from 0), and where its tokens
lie (number of the token part, first token in it, how many without an end of text)."""
ENTRY_BYTES = 44
PARTITION_BYTES = 64_000_000
"""Of entries, so that a task needs about 450 MB: seven times as much, where their pieces are placed."""
MOST_PARTITION_BITS = 12
"""4,096 partitions: with more, every task of the job before would write parts of some kilobytes."""
SEGMENTS = "segments"


Number = TypeVar("Number", int, np.ndarray)


def train_stream(source: Number) -> Number:
    """Number of the stream of a source's training documents; those of all sources come first."""
    return source


def validation_stream(source: Number, sources: int) -> Number:
    """Number of the stream of the documents that a source holds out."""
    return source + sources


def partition_bits(rows: int, row_bytes: int) -> int:
    """The leading bits that tell partitions apart: of so many rows, each has about PARTITION_BYTES at the most."""
    partitions = -(-rows * row_bytes // PARTITION_BYTES)
    return min(max(0, partitions - 1).bit_length(), MOST_PARTITION_BITS)


def leading(values: np.ndarray, bits: int) -> np.ndarray:
    """The first bits, one at least, of uint64 numbers, as int64."""
    return (values >> np.uint64(64 - bits)).astype(np.int64)


@dataclass(frozen=True)
class Draws:
    """Which hash orders the documents of each stream.

    Attributes:
        sources: how many.
        training: key of the training streams, 64 bits; every pass draws again.
        validation: key of the others.
    """

    sources: int
    training: int
    validation: int

    def partitions(self, stream: np.ndarray, words: np.ndarray, time: np.ndarray, number: int, bits: int) -> np.ndarray:
        """Which partition (int64) of a pass each entry is in; `bits` are the leading ones that all in it share."""
        return leading(self.of(stream, words, time, number), bits) if bits else np.zeros(len(words), dtype=np.int64)

    def of(self, stream: np.ndarray, words: np.ndarray, time: np.ndarray, number: int) -> np.ndarray:
        """The draws (uint64) of entries in a pass: each time of a document has one of its own."""
        draws = np.empty(len(words), dtype=np.uint64)
        training = stream < self.sources
        for key, of_kind in ((self.training, training), (self.validation, ~training)):
            for one in range(int(time[of_kind].max(initial=-1)) + 1):
                chosen = of_kind & (time == one)
                # numpy's indexing by brackets takes five times as long for rows of two numbers.
                own = words.compress(chosen, axis=0)
                draws[chosen] = draw(own, order_key(key, "pass", *((number, one) if one else (number,))))
        return draws


@dataclass(frozen=True)
class Segment:
    """A part of a pass of every stream, in order.

    Attributes:
        first: int64 of shape (streams + 1,), where the documents of each stream begin among the others.
        words: uint64 of shape (n, 2), ids.
        time: int32 of shape (n,), which time in the pass this is.
        part: int32 of shape (n,), number of the token part.
        offset: int64 of shape (n,), first token within it.
        tokens: int64 of shape (n,), without an end of text.
    """

    first: np.ndarray
    words: np.ndarray
    time: np.ndarray
    part: np.ndarray
    offset: np.ndarray
    tokens: np.ndarray

    def of(self, stream: int) -> Segment:
        """The part of one stream."""
        begin, end = self.first[stream : stream + 2].tolist()
        return Segment(
            np.array([0, end - begin]),
            *(getattr(self, name)[begin:end] for name in ("words", "time", "part", "offset", "tokens")),
        )

    def starts(self, base: int) -> np.ndarray:
        """Where its documents begin in their stream (int64 of shape (n + 1,)), the first at `base`; and its end."""
        starts = np.empty(len(self.tokens) + 1, dtype=np.int64)
        starts[0] = base
        np.cumsum(self.tokens + 1, out=starts[1:])
        starts[1:] += base
        return starts


def sort_segment(task: Task, draws: Draws, bits: int, number: int, entries: Shuffled, folder: str) -> Done:
    """Sort a partition of a pass: payload `partition`.

    Args:
        bits: leading ones, which all draws of a partition share.
        number: of the pass.
        entries: of the pass.
        folder: where to.

    Returns:
        per stream `entries` and `tokens`, ends of text counted.
    """
    partition = task.payload["partition"]
    table = entries.read(partition)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    words = np.stack([columns["high"], columns["low"]], axis=1)
    stream, time = columns["stream"], columns["time"]
    # What all have in common goes, so that the rest is spread over 64 bits again.
    keys = draws.of(stream, words, time, number) << np.uint64(bits) if bits else draws.of(stream, words, time, number)
    streams = 2 * draws.sources
    first = np.concatenate([[0], np.cumsum(np.bincount(stream, minlength=streams))]).astype(np.int64)
    order = by_bin(stream, first)
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        own = order[begin:end]
        order[begin:end] = own[ordered_by(keys[own], columns["high"], columns["low"], time, rows=own)]
    tokens = columns["tokens"][order]
    passed = np.concatenate([[0], np.cumsum(tokens + 1)])
    segment = Segment(
        first, words.take(order, axis=0), time[order], columns["part"][order], columns["offset"][order], tokens
    )
    path = save(as_path(folder), segment_name(number, partition), segment)
    return Done([path], {"entries": np.diff(first).tolist(), "tokens": np.diff(passed[first]).tolist()})


def segment_name(number: int, partition: int) -> str:
    """The saved name of a partition of a pass."""
    return f"{number:05d}-{partition:05d}"


def draw_again(
    task: Task, draws: Draws, bits: int, number: int, streams: Sequence[int], folder: str
) -> Generator[Sent, None, Done]:
    """Give the documents of a partition of the first pass to the partitions of another: payload `partition`.

    Args:
        bits, folder: see `sort_segment`.
        number: of the other pass.
        streams: those that need it.
    """
    first = load_record(folder, segment_name(0, task.payload["partition"]), Segment)
    tables = [_entries_of(first.of(stream), stream) for stream in streams]
    table = pa.concat_tables([ENTRIES_SCHEMA.empty_table(), *tables]).combine_chunks()
    columns = {name: table[name].to_numpy() for name in ("stream", "high", "low", "time")}
    words = np.stack([columns["high"], columns["low"]], axis=1)
    yield Sent(pass_job(number), table, draws.partitions(columns["stream"], words, columns["time"], number, bits))
    return Done()


def _entries_of(segment: Segment, stream: int) -> pa.Table:
    return pa.table(
        [
            np.full(len(segment.words), stream, dtype=np.int32),
            segment.words[:, 0],
            segment.words[:, 1],
            segment.time,
            segment.part,
            segment.offset,
            segment.tokens,
        ],
        schema=ENTRIES_SCHEMA,
    )


def pass_job(number: int) -> str:
    """The name of the job that draws the documents of a pass again, and of what it sends."""
    return f"pass-{number}"


@dataclass(frozen=True)
class Bases:
    """Where segments begin in their streams.

    Attributes:
        tokens: int64 of shape (passes, partitions, streams), tokens of a segment, ends of text counted.
        entries: the same, documents.
        begins: the same, first token in the stream.
    """

    tokens: np.ndarray
    entries: np.ndarray
    begins: np.ndarray


@dataclass(frozen=True)
class Streams:
    """The segments of all passes that were made so far.

    Attributes:
        work: of the stage; the segments are in a folder of it.
        bits: leading ones that tell partitions apart.
        draws: which orders them.
        bases: where each begins.
    """

    work: Path
    bits: int
    draws: Draws
    bases: Bases

    @property
    def folder(self) -> Path:
        """Where the segments are."""
        return self.work / SEGMENTS

    @property
    def passes(self) -> int:
        """How many passes there are."""
        return len(self.bases.tokens)

    def pass_tokens(self, stream: int) -> int:
        """Tokens of one pass, ends of text and repeats counted."""
        return int(self.bases.tokens[0, :, stream].sum())

    def tokens(self, stream: int) -> int:
        """Tokens of all passes that were made of it."""
        return int(self.bases.tokens[:, :, stream].sum())

    def places(self, stream: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Pass, partition and first token of each segment of a stream that begins before a token and is not empty."""
        for number, partition in np.argwhere(self.bases.entries[:, :, stream] > 0).tolist():
            base = int(self.bases.begins[number, partition, stream])
            if base >= end:
                return
            yield number, partition, base

    def segment(self, number: int, partition: int) -> Segment:
        """One segment."""
        return load_record(self.folder, segment_name(number, partition), Segment)

    def starts(self, stream: int, end: int) -> Iterator[np.ndarray]:
        """Segment by segment, where the documents of a stream begin (`Segment.starts`)."""
        for number, partition, base in self.places(stream, end):
            yield self.segment(number, partition).of(stream).starts(base)


def make_streams(entries: Shuffled, work: Path, bits: int, draws: Draws, context: Context) -> Streams:
    """Sort the first pass.

    Args:
        entries: of ENTRIES_SCHEMA, cut into partitions by the first `bits` bits of the draws.
        work: the stage's work folder.
    """
    results = _sort_pass(entries, work, bits, draws, 0, context)
    return Streams(work, bits, draws, _based([results]))


def add_pass(streams: Streams, wanted: Sequence[int], context: Context) -> Streams:
    """Some of the streams with one more pass."""
    number, bits, draws = streams.passes, streams.bits, streams.draws
    again = partial(
        draw_again, draws=draws, bits=bits, number=number, streams=tuple(wanted), folder=str(streams.folder)
    )
    job, partitions = pass_job(number), 1 << bits
    _, entries = run_shuffle(job, partition_tasks(partitions), again, context, {job: partitions}, direct=True)
    results = _sort_pass(entries[job], streams.work, bits, draws, number, context)
    before = [_totals_of(streams.bases, one) for one in range(number)]
    return Streams(streams.work, bits, draws, _based([*before, results]))


Totals = tuple[np.ndarray, np.ndarray]
"""Entries and tokens of a pass: int64 of shape (partitions, streams) each."""


def _sort_pass(entries: Shuffled, work: Path, bits: int, draws: Draws, number: int, context: Context) -> Totals:
    sort = partial(sort_segment, draws=draws, bits=bits, number=number, entries=entries, folder=str(work / SEGMENTS))
    results: list[dict[str, Any]] = run_tasks(f"sort-{number}", partition_tasks(1 << bits), sort, context, direct=True)
    entries_, tokens = (np.array([result[key] for result in results], dtype=np.int64) for key in ("entries", "tokens"))
    return entries_, tokens


def _totals_of(bases: Bases, number: int) -> Totals:
    return bases.entries[number], bases.tokens[number]


def _based(passes: Sequence[Totals]) -> Bases:
    entries, tokens = (np.stack([one[which] for one in passes]) for which in (0, 1))
    flat = tokens.reshape(-1, tokens.shape[-1])
    return Bases(tokens, entries, (np.cumsum(flat, axis=0) - flat).reshape(tokens.shape))
