"""Placement of a mixture's documents: packs each stream into rows and sends the pieces
of each segment to shards.

First, one task per stream (`lay_out_stream`) scans its segments, counts the cut
documents and the padding of their rows, and saves the state that the rows of each
segment depend on. Then one task per segment (`place_segment`) cuts it into pieces, computes the place of each row by the
keyed permutation, and sends the pieces to their shards. A task holds one segment, its
documents and their pieces: seven times the bytes of its entries (`streams.py`), plus
some numbers per possible length for `best_fit`. A piece of a rearranged document
(`fill_in_middle.py`) becomes up to four runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import offsets_of
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners.shuffle import Sending, Sent, Shuffled, run_shuffle
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.mixtures.schema.mix import Mix
from gristmill.tokenize.mixing.quotas import Quotas
from gristmill.tokenize.mixing.send_tokens import WANTED, wanted_of
from gristmill.tokenize.mixing.streams import (
    Bases,
    Segment,
    Streams,
    add_pass,
    segment_name,
)
from gristmill.tokenize.packing.array_files import load_record, save
from gristmill.tokenize.packing.fill_in_middle import ADDED, Rearranging, Runs
from gristmill.tokenize.packing.packing import (
    Dealing,
    Packing,
    Pieces,
    Places,
    RowCounts,
    cut,
    packing_of,
)
from gristmill.tokenize.packing.packing_cost import PackingCost
from gristmill.tokenize.shuffle import (
    order_key,
    permute,
    phase_parts,
    rank,
)

LAYOUT_JOB, PLACE_JOB = "layout", "place"
PLACED_SCHEMA = pa.schema(
    [
        ("row", pa.int32()),
        ("length", pa.int32()),
        ("high", pa.uint64()),
        ("low", pa.uint64()),
        ("source", pa.int32()),
        ("copy", pa.int32()),
        ("offset", pa.int64()),
        ("part", pa.int32()),
        ("first", pa.int64()),
        ("text", pa.int32()),
    ]
)
"""A piece: row within the shard, tokens with the end of text, words of the document's
id, source, pass over the source, first token within the document, token part, first
token within the part, tokens without the end of text.
"""
ENDS_SCHEMA = PLACED_SCHEMA.append(pa.field("end", pa.int32()))
"""Schema with rearranged documents: one row per run of a piece (`fill_in_middle.py`),
with the token after the run.
"""


@dataclass(frozen=True)
class Layout:
    """Rows of a packed stream.

    Attributes:
        ends: end of each phase in the stream.
        rows_per_phase: rows of each phase.
        documents: number of entries taken from the stream.
        tokens: tokens up to the end of the last entry taken.
        cost: of the packing.
    """

    ends: tuple[int, ...]
    rows_per_phase: tuple[int, ...]
    documents: int
    tokens: int
    cost: PackingCost

    @property
    def end(self) -> int:
        """End of the last phase in the stream."""
        return self.ends[-1]

    @property
    def rows(self) -> int:
        """Rows of all phases."""
        return sum(self.rows_per_phase)

    @property
    def tokens_per_phase(self) -> list[int]:
        """Document tokens in the rows of each phase."""
        return _differences(self.ends)


def find_ends(
    streams: Streams,
    section: Mix,
    quotas: Quotas,
    context: Context,
) -> tuple[Streams, list[list[int]]]:
    """Find the end of each phase in each source's stream, adding passes to streams that
    are too short.
    """
    ends = [
        (np.cumsum(rows) * section.sequence_length).tolist()
        for rows in zip(*quotas.rows, strict=True)
    ]
    while short_streams := [
        stream
        for stream, stream_ends in enumerate(ends)
        if stream_ends[-1] > streams.tokens(stream)
    ]:
        streams = add_pass(streams, short_streams, context)
    return streams, ends


def lay_out(
    streams: Streams,
    ends: Sequence[Sequence[int]],
    held_out: Sequence[int],
    section: Mix,
    context: Context,
) -> list[Layout]:
    """Pack every stream into rows: the training streams of all sources, then their
    held-out streams.

    Args:
        streams: of all sources.
        ends: of each source's training stream, by phase.
        held_out: end of each source's held-out stream.
        section: the mixture.
        context: of the jobs.
    """
    length = section.sequence_length
    save(context.work / "plan", "bases", streams.bases)
    all_ends = [*map(list, ends), *([end] for end in held_out)]
    tasks = [
        Task(f"{stream:05d}", {"stream": stream, "ends": stream_ends})
        for stream, stream_ends in enumerate(all_ends)
    ]
    process = partial(
        lay_out_stream,
        streams=streams_for_workers(streams),
        packing=packing_of(section),
        sources=len(ends),
        plan=context.work / "plan",
    )
    results = run_tasks(LAYOUT_JOB, tasks, process, context)
    return [
        Layout(
            tuple(stream_ends),
            tuple(
                result["rows"]
                or [tokens // length for tokens in _differences(stream_ends)]
            ),
            result["cost"]["documents"],
            result["tokens"],
            PackingCost(**result["cost"]),
        )
        for stream_ends, result in zip(all_ends, results, strict=True)
    ]


def _differences(ends: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in pairwise([0, *ends])]


def streams_for_workers(streams: Streams) -> Streams:
    """Streams without their bases, which workers load from a file."""
    empty = np.empty((0, 0, 0), np.int64)
    return replace(streams, bases=Bases(empty, empty, empty))


def with_bases(streams: Streams, plan: Path) -> Streams:
    """The inverse of `streams_for_workers`."""
    return replace(streams, bases=load_record(plan, "bases", Bases))


def lay_out_stream(
    task: Task, streams: Streams, packing: Packing, sources: int, plan: Path
) -> Done:
    """Scan a stream (payload `stream`, `ends`) and save the state that the rows of each
    segment depend on.

    Returns:
        `rows` of each phase (empty if the quotas determine them), `tokens`, `cost`.
    """
    streams = with_bases(streams, plan)
    stream, ends = task.payload["stream"], task.payload["ends"]
    if stream >= sources:
        packing = Packing(packing.sequence_length)
    folder = plan / f"stream-{stream:05d}"
    counts = RowCounts(ends, packing)
    files = []
    tokens = 0
    for number, partition, base in streams.places(stream, ends[-1]):
        starts = streams.segment(number, partition).of(stream).starts(base)
        if packing.best_fit:
            files.append(save(folder, segment_name(number, partition), counts.places()))
        counts.add(starts)
        tokens = int(starts[int(np.searchsorted(starts[:-1], ends[-1]))])
    rows = []
    if packing.best_fit:
        rows = counts.rows()
        for phase, dealing in enumerate(counts.dealings()):
            files.append(save(folder, dealing_name(phase), dealing))
    return Done(files, {"rows": rows, "tokens": tokens, "cost": asdict(counts.cost())})


def dealing_name(phase: int) -> str:
    """File name of the bins of a phase's remainders."""
    return f"phase-{phase:05d}"


@dataclass(frozen=True)
class Shards:
    """Mapping from the rows of each source to places in the shards.

    Attributes:
        seed: of the row order.
        sources: names, by source number.
        phases: training rows of each source, by phase.
        shard_rows: rows of a training shard.
        copies: of each source, the most copies of a document in one pass.
    """

    seed: int
    sources: tuple[str, ...]
    phases: tuple[tuple[int, ...], ...]
    shard_rows: int
    copies: tuple[int, ...]

    @property
    def training(self) -> int:
        """Number of training shards, which precede the held-out shards (one per
        source).
        """
        return -(-sum(map(sum, self.phases)) // self.shard_rows)

    @property
    def number(self) -> int:
        """Number of all shards."""
        return self.training + len(self.sources)

    def places(self, source: int, rows: np.ndarray) -> np.ndarray:
        """Place in the files (int64) of each row of a source's stream: shuffled, and
        merged with the other sources.

        Within a phase, the rows of a source are permuted by a key, then the sources are
        merged (`shuffle.py`).
        """
        if not len(rows):
            return rows
        # Consecutive rows repeat, once per piece: each is permuted only once.
        low, high = int(rows.min()), int(rows.max()) + 1
        repeats = high - low < len(rows)
        numbers = np.arange(low, high) if repeats else rows
        name = self.sources[source]
        begins = offsets_of([counts[source] for counts in self.phases])
        ends = offsets_of([sum(counts) for counts in self.phases])
        phases = np.searchsorted(begins, numbers, side="right") - 1
        places = np.empty(len(numbers), np.int64)
        for phase in np.unique(phases).tolist():
            selection = np.flatnonzero(phases == phase)
            counts = self.phases[phase]
            key = order_key(self.seed, "mix", "rows", *phase_parts(phase), name)
            within = permute(numbers[selection] - begins[phase], counts[source], key)
            places[selection] = ends[phase] + rank(counts, source, within)
        return places[rows - low] if repeats else places


def place(
    streams: Streams,
    layouts: Sequence[Layout],
    shards: Shards,
    packing: Packing,
    parts: int,
    context: Context,
    rearranging: Rearranging | None = None,
) -> tuple[Shuffled, Shuffled | None]:
    """Send the pieces of all segments to their shards, in stream order.

    Args:
        parts: number of token parts that receive requests (`send_tokens.py`); 0 for no
            requests.
        rearranging: selection of rearranged documents.

    Returns:
        the pieces and the requests.
    """
    bases = streams.bases
    ends = np.array([layout.end for layout in layouts])
    is_used = np.asarray(((bases.begins < ends) & (bases.entries > 0)).any(axis=2))
    is_used[0, 0] = True
    tasks = [
        Task(segment_name(number, partition), {"pass": number, "partition": partition})
        for number, partition in np.argwhere(is_used).tolist()
    ]
    process = partial(
        place_segment,
        streams=streams_for_workers(streams),
        shards=shards,
        packing=packing,
        ends=[layout.ends for layout in layouts],
        plan=context.work / "plan",
        sends=parts > 0,
        rearranging=rearranging,
    )
    partitions = {PLACE_JOB: shards.number}
    if parts:
        partitions[WANTED] = parts
    _, sent = run_shuffle(PLACE_JOB, tasks, process, context, partitions)
    return sent[PLACE_JOB], sent.get(WANTED)


def place_segment(
    task: Task,
    streams: Streams,
    shards: Shards,
    packing: Packing,
    ends: Sequence[Sequence[int]],
    plan: Path,
    sends: bool = False,
    rearranging: Rearranging | None = None,
) -> Sending:
    """Cut a segment (payload `pass`, `partition`) into pieces and send them to their
    shards.

    Args:
        sends: also send requests to the token parts.
        rearranging: see `place`.
    """
    streams = with_bases(streams, plan)
    pieces = [_pieces_of(task, streams, shards, packing, ends, plan, rearranging)]
    if sends:
        yield wanted_of(*pieces[0])
    # frees the pieces while the receiver sorts them
    yield Sent(PLACE_JOB, *pieces.pop())
    return Done()


def _pieces_of(
    task: Task,
    streams: Streams,
    shards: Shards,
    packing: Packing,
    ends: Sequence[Sequence[int]],
    plan: Path,
    rearranging: Rearranging | None,
) -> tuple[pa.Table, np.ndarray]:
    """Pieces of a segment (PLACED_SCHEMA) and the shard of each."""
    number, partition = task.payload["pass"], task.payload["partition"]
    name = segment_name(number, partition)
    segment = streams.segment(number, partition)
    schema = PLACED_SCHEMA if rearranging is None else ENDS_SCHEMA
    tables = [schema.empty_table()]
    targets = [np.empty(0, np.int64)]
    for stream, stream_ends in enumerate(ends):
        base = int(streams.bases.begins[number, partition, stream])
        documents = segment.of(stream)
        if base >= stream_ends[-1] or not len(documents.tokens):
            continue
        source = stream % len(shards.sources)
        trains = stream < len(shards.sources)
        copy = number * (shards.copies[source] if trains else 1) + documents.time
        for pieces in _cut_phases(
            documents.starts(base),
            stream_ends,
            packing if trains else Packing(packing.sequence_length),
            plan / f"stream-{stream:05d}",
            name,
        ):
            target = np.full(len(pieces.row), shards.training + source)
            row = pieces.row
            if trains:
                places = shards.places(source, pieces.row)
                target, row = np.divmod(places, shards.shard_rows)
            runs = None
            if rearranging is not None:
                runs = _runs_of(documents, pieces, source, number, trains, rearranging)
                target = target[runs.piece]
            tables.append(_placed(documents, pieces, row, source, copy, runs))
            targets.append(target)
    return pa.concat_tables(tables).combine_chunks(), np.concatenate(targets)


def _cut_phases(
    starts: np.ndarray, ends: Sequence[int], packing: Packing, folder: Path, name: str
) -> Iterator[Pieces]:
    """Pieces of a segment; one `Pieces` per overlapping phase for `best_fit`."""
    if not packing.best_fit:
        yield cut(starts, 0, ends[-1], packing.sequence_length)
        return
    places = load_record(folder, name, Places)
    for phase, (begin, end) in enumerate(pairwise([0, *ends])):
        if begin < starts[-1] and end > starts[0]:
            dealing = load_record(folder, dealing_name(phase), Dealing)
            yield cut(
                starts, begin, end, packing.sequence_length, places, phase, dealing
            )


def _placed(
    segment: Segment,
    pieces: Pieces,
    row: np.ndarray,
    source: int,
    copy: np.ndarray,
    runs: Runs | None,
) -> pa.Table:
    """Table of pieces in PLACED_SCHEMA, or of their runs in ENDS_SCHEMA."""
    entry, length, offset = pieces.entry, pieces.length, pieces.offset
    first = offset
    text = np.minimum(length, segment.tokens[entry] - offset)
    ends = []
    if runs is not None:
        row, entry = row[runs.piece], entry[runs.piece]
        _, offset, length, first, text, end = runs
        ends = [end]
    return pa.table(
        [
            row.astype(np.int32),
            length.astype(np.int32),
            segment.words[entry, 0],
            segment.words[entry, 1],
            np.full(len(entry), source, np.int32),
            copy[entry].astype(np.int32),
            offset,
            segment.part[entry],
            segment.offset[entry] + first,
            text.astype(np.int32),
            *ends,
        ],
        schema=ENDS_SCHEMA if ends else PLACED_SCHEMA,
    )


def _runs_of(
    segment: Segment,
    pieces: Pieces,
    source: int,
    number: int,
    trains: bool,
    rearranging: Rearranging,
) -> Runs:
    """Runs of the pieces in a pass."""
    entry, position = np.unique(pieces.entry, return_inverse=True)
    words, time = segment.words[entry], segment.time[entry]
    is_rearranged = np.zeros(len(entry), bool)
    if trains:
        is_rearranged = rearranging.chosen(np.full(len(entry), source), words, time)
    tokens = segment.tokens[entry] - ADDED * is_rearranged
    return rearranging.cut_pieces(
        is_rearranged[position],
        words[position],
        time[position],
        number,
        tokens[position],
        pieces.offset,
        pieces.length,
    )
