"""Where the documents of a mixture go: each stream is packed into rows, and each segment's pieces are given to shards.

First every stream is gone through once, segment by segment, by a task of its own (`lay_out_stream`): it counts what all
packings cost and notes what the rows of each segment depend on. Then every segment is cut into pieces by a task of its
own (`place_segment`), which knows by the keyed permutation of the rows where each of them goes, and sends them to their
shards. A task holds one segment, its documents and their pieces: seven times the bytes of
its entries (`streams.py`), and for `best_fit` some numbers for each possible length. A rearranged document
(`fill_in_middle.py`) has up to four runs in place of a piece.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import as_path
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks
from gristmill.dataprep.jobs.shuffled import Sent, Shuffled, run_shuffle
from gristmill.mixtures.mix import Mix
from gristmill.tokenize.mixing.continued import USED, USED_SCHEMA, Before
from gristmill.tokenize.mixing.fill_in_middle import ADDED, Rearranging
from gristmill.tokenize.mixing.packing import (
    Costs,
    Dealing,
    Packing,
    Pieces,
    Places,
    cut,
    ends_of_phases,
    packing_of,
)
from gristmill.tokenize.mixing.plan_files import load_record, save
from gristmill.tokenize.mixing.quotas import MixError, Quotas, exact
from gristmill.tokenize.mixing.send_tokens import WANTED, wanted_of
from gristmill.tokenize.mixing.streams import (
    Segment,
    Streams,
    add_pass,
    leading,
    segment_name,
    train_stream,
    validation_stream,
)
from gristmill.tokenize.order import half_bits_of, order_key, phase_parts, rank, round_keys
from gristmill.tokenize.order_kernels import permute_source, rank_source

LAYOUT_JOB, PLACE_JOB = "layout", "place"
PIECE_COLUMNS = ("row", "entry", "offset", "length")
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
"""A piece: its row within the shard, tokens with the end of text, the words of its document's id, source, which pass
over it this is, first token within the document, token part, first token in that, tokens without the end of text."""
PLACED_BYTES = 56
ENDS_SCHEMA = PLACED_SCHEMA.append(pa.field("end", pa.int32()))
"""Where documents are rearranged: a piece is as many rows as it has runs (`fill_in_middle.py`), each with the id of the
token behind it."""


@dataclass(frozen=True)
class Layout:
    """A stream, packed into rows.

    Attributes:
        ends: up to where in it each phase goes.
        rows_per_phase: how many rows each phase has.
        tokens_per_phase: tokens of documents in these.
        documents: how many entries of the stream are taken.
        tokens: of these, to the end of the last one.
        costs: what every packing makes of the same tokens, by its name (`packing.Costs.accounts`).
    """

    ends: tuple[int, ...]
    rows_per_phase: tuple[int, ...]
    tokens_per_phase: tuple[int, ...]
    documents: int
    tokens: int
    costs: Mapping[str, Mapping[str, Any]]

    @property
    def end(self) -> int:
        """Up to where in the stream it goes."""
        return self.ends[-1]

    @property
    def rows(self) -> int:
        """Rows of all phases."""
        return sum(self.rows_per_phase)

    @property
    def row_tokens(self) -> int:
        """Tokens of documents in all rows."""
        return sum(self.tokens_per_phase)


def find_ends(
    streams: Streams,
    sources: Mapping[str, Mapping[str, Any]],
    section: Mix,
    quotas: Quotas,
    context: Context,
    before: Before | None = None,
) -> tuple[Streams, list[list[int]]]:
    """Up to where each source's stream goes in each phase; streams that are too short get one more pass, and another.

    Of a mixture that continues a set, up to where it goes at all.

    Raises:
        MixError: rows that begin with a document drop so much that a source's documents do not fill its quota.
    """
    packing, found = packing_of(section), dict[int, list[int]]()
    while len(found) < len(sources):
        lacking = []
        for number, (name, source) in enumerate(sources.items()):
            if number in found:
                continue
            wanted = [rows[number] * section.sequence_length for rows in quotas.rows]
            if before is not None:  # of rows that are passed over, too
                wanted = [max(sum(wanted), before.reach(number) * section.sequence_length)]
            stream = train_stream(number)
            most = int(exact(source["max_epochs"]) * streams.pass_tokens(stream))
            ends = ends_of_phases(streams.starts(stream, most), wanted, packing)
            if streams.tokens(stream) >= most if ends is None else ends[-1] > most:
                raise MixError(_describe_short(name, sum(wanted), most, packing))
            if ends is None or ends[-1] > streams.tokens(stream):
                lacking.append(stream)
            else:
                found[number] = ends
        if lacking:
            streams = add_pass(streams, lacking, context)
    return streams, [found[number] for number in range(len(sources))]


def _describe_short(name: str, quota: int, most: int, packing: Packing) -> str:
    return (
        f"sources.{name}: {most} tokens may be read (max_epochs), but rows that begin with a document drop what "
        f"does not fit into them, so these do not fill {quota} tokens ({quota // packing.sequence_length} rows of "
        f"{packing.sequence_length}); raise its max_epochs, lower its weight or mix.tokens, or set "
        + ("mix.document_starts to any" if packing.best_fit else "mix.packing to best_fit")
    )


def held_out_ends(streams: Streams, sources: int, section: Mix) -> list[int]:
    """Up to where the held-out stream of each source goes: whole rows, once each, whatever seed and packing are."""
    length = section.sequence_length
    tokens = [streams.pass_tokens(validation_stream(number, sources)) for number in range(sources)]
    return [min(section.max_validation_rows, each // length) * length for each in tokens]


def lay_out(
    streams: Streams,
    ends: Sequence[Sequence[int]],
    held_out: Sequence[int],
    section: Mix,
    quotas: Quotas,
    context: Context,
) -> list[Layout]:
    """Pack every stream into rows: those of the sources, then those that they hold out.

    Args:
        streams: all of them.
        ends: of each source's stream, phase by phase.
        held_out: where each source's held-out stream ends.
        section: the mixture.
        quotas: rows of each source, phase by phase.
        context: where to run.
    """
    sources, length = len(ends), section.sequence_length
    save(context.work / "plan", "bases", streams.bases)
    packing = packing_of(section)
    tasks = [
        Task(f"{stream:05d}", {"stream": stream, "ends": [int(end) for end in of_stream]})
        for stream, of_stream in enumerate([*ends, *([end] for end in held_out)])
    ]
    process = partial(
        lay_out_stream,
        streams=streams_for_workers(streams),
        packing=packing,
        sources=sources,
        plan=str(context.work / "plan"),
    )
    results = run_tasks(LAYOUT_JOB, tasks, process, context, direct=True)
    layouts = []
    for stream, result in enumerate(results):
        of_stream = tasks[stream].payload["ends"]
        tokens = [line[stream] * length for line in quotas.rows] if stream < sources else of_stream
        rows = result["rows"] or [number // length for number in tokens]
        layouts.append(
            Layout(tuple(of_stream), tuple(rows), tuple(tokens), result["documents"], result["tokens"], result["costs"])
        )
    return layouts


def streams_for_workers(streams: Streams) -> Streams:
    """The same, without the numbers of its segments, which are in a file."""
    none = np.empty((0, 0, 0), dtype=np.int64)
    return Streams(streams.work, streams.bits, streams.draws, type(streams.bases)(none, none, none))


def with_bases(streams: Streams, plan: str) -> Streams:
    """The inverse of `streams_for_workers`."""
    return Streams(streams.work, streams.bits, streams.draws, load_record(plan, "bases", type(streams.bases)))


@dataclass(frozen=True)
class SavedPlaces:
    """`packing.Places` of a segment, of each phase where there are several."""

    free: np.ndarray
    rows: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class SavedDealing:
    """`packing.Dealing` of a phase."""

    where: np.ndarray
    begins: np.ndarray
    dealt: np.ndarray


def lay_out_stream(task: Task, streams: Streams, packing: Packing, sources: int, plan: str) -> Done:
    """Go through a stream: payload `stream`, `ends`. Leaves what the rows of each segment depend on.

    Returns:
        `rows` of each phase (empty where they are as many as the phases ask for), `documents`, `tokens`, `costs`.
    """
    streams, stream, ends = with_bases(streams, plan), task.payload["stream"], task.payload["ends"]
    used = packing if stream < sources else Packing(packing.sequence_length)
    costs, files, tokens = Costs(ends, used), [], 0
    folder, keeps = as_path(plan) / f"stream-{stream:05d}", used.best_fit or used.aligned
    for number, partition, base in streams.places(stream, ends[-1]):
        starts = streams.segment(number, partition).of(stream).starts(base)
        if keeps:
            places = costs.places()
            files.append(
                save(
                    folder,
                    segment_name(number, partition),
                    SavedPlaces(
                        np.array([one.free for one in places]),
                        np.array([one.rows for one in places]),
                        np.stack([one.ranks for one in places]),
                    ),
                )
            )
        costs.add(starts)
        tokens = int(starts[int(np.searchsorted(starts[:-1], ends[-1]))])
    for phase, dealing in enumerate(costs.dealings()):
        files.append(
            save(
                folder,
                _dealing_name(phase),
                SavedDealing(np.array([dealing.first_row, dealing.whole]), dealing.begins, dealing.dealt),
            )
        )
    accounts = costs.accounts()
    return Done(
        files,
        {
            "rows": costs.rows_of_phases() if used.best_fit else [],
            "tokens": tokens,
            "costs": accounts,
            "documents": accounts["stream"]["documents"],
        },
    )


def _dealing_name(phase: int) -> str:
    return f"phase-{phase:05d}"


@dataclass(frozen=True)
class Shards:
    """Which rows of which source lie where.

    Attributes:
        seed: of the order of the rows.
        sources: names, in the order of the source numbers.
        phases: training rows of each source, for every phase in order.
        shard_rows: rows of a training shard.
        copies: of each source, how often a document is in one pass at the most.
        before: the set that is continued, whose kept rows are the first phases.
        ledger_bits: see `Candidates`.
    """

    seed: int
    sources: tuple[str, ...]
    phases: tuple[tuple[int, ...], ...]
    shard_rows: int
    copies: tuple[int, ...]
    before: Before | None = None
    ledger_bits: int = 0

    @property
    def training(self) -> int:
        """Number of training shards; the shards of held-out rows, one for each source, follow them."""
        return -(-sum(map(sum, self.phases)) // self.shard_rows)

    @property
    def number(self) -> int:
        """Of all shards."""
        return self.training + len(self.sources)

    def places(self, source: int, rows: np.ndarray) -> np.ndarray:
        """At which place of the files each row of a source's stream lies (int64): shuffled, and merged with the others.

        Within a phase the rows of a source are permuted by a key; then the sources are merged (`order.py`). Behind a
        set that is continued, rows come by their numbers (`continued.py`); -1 are those that are passed over.
        """
        if self.before is not None:
            return self._places_behind(self.before, source, rows)
        own = np.cumsum([0, *(counts[source] for counts in self.phases)])
        ends = np.cumsum([0, *(sum(counts) for counts in self.phases)])
        phases, places = np.searchsorted(own, rows, side="right") - 1, np.empty_like(rows)
        for phase in np.unique(phases).tolist():
            chosen = np.flatnonzero(phases == phase)
            low, high = int(rows[chosen].min()), int(rows[chosen].max()) + 1
            # Rows that follow one another, of which each has several pieces, are looked at once.
            asked = np.arange(low, high) if high - low < len(chosen) else rows[chosen]
            found = ends[phase] + self._merged(phase, source, asked - own[phase])
            places[chosen] = found[rows[chosen] - low] if high - low < len(chosen) else found
        return places

    def _places_behind(self, before: Before, source: int, rows: np.ndarray) -> np.ndarray:
        asked, back = np.unique(rows, return_inverse=True)
        numbers, places = before.numbers(source, self.sources[source], asked, self.seed), np.full(len(asked), -1)
        own = np.cumsum([0, *(counts[source] for counts in self.phases)])
        ends = np.cumsum([0, *(sum(counts) for counts in self.phases)])
        begun = before.kept()[1]
        phases = np.searchsorted(own, numbers, side="right") - 1
        for phase in np.unique(phases[phases < len(self.phases)]).tolist():
            chosen = np.flatnonzero(phases == phase)
            within = numbers[chosen] - own[phase]
            places[chosen] = ends[phase] + (
                rank(begun[phase], np.array(source), within)
                if phase < len(begun)
                else self._merged(phase, source, within)
            )
        found: np.ndarray = places[back]
        return found

    def _merged(self, phase: int, source: int, rows: np.ndarray) -> np.ndarray:
        """At which place of a phase rows of a source lie; changes `rows`."""
        counts, places = np.array(self.phases[phase], dtype=np.int64), np.empty_like(rows)
        key = order_key(self.seed, "mix", "rows", *phase_parts(phase), self.sources[source])
        permute_source(
            rows,
            counts[source],
            half_bits_of(int(counts[source])),
            round_keys(key),
            np.empty(len(rows), dtype=np.uint64),
            places,
        )
        rank_source(counts, source, rows, places)
        return places


def place(
    streams: Streams,
    layouts: Sequence[Layout],
    shards: Shards,
    packing: Packing,
    parts: int,
    context: Context,
    rearranging: Rearranging | None = None,
) -> tuple[Shuffled, Shuffled | None, Used | None]:
    """Send the pieces of all segments to their shards, in the order of the streams.

    Args:
        parts: how many token parts are told what is wanted of them (`send_tokens.py`); 0 where none is.
        rearranging: which documents are.

    Returns:
        the pieces, what is wanted, and which documents are used where a set is continued.
    """
    tasks = [
        Task(segment_name(number, partition), {"pass": number, "partition": partition})
        for number, partition in _used_segments(streams, layouts)
    ]
    process = partial(
        place_segment,
        streams=streams_for_workers(streams),
        shards=shards,
        packing=packing,
        ends=[layout.ends for layout in layouts],
        plan=str(context.work / "plan"),
        sends=parts > 0,
        rearranging=rearranging,
    )
    partitions = {
        PLACE_JOB: shards.number,
        **({WANTED: parts} if parts else {}),
        **({USED: 1 << shards.ledger_bits} if shards.before is not None else {}),
    }
    results, sent = run_shuffle(PLACE_JOB, tasks, process, context, partitions, direct=True)
    used = (
        None
        if shards.before is None
        else Used(sent[USED], np.sum([result["copies"] for result in results], axis=0).tolist())
    )
    return sent[PLACE_JOB], sent.get(WANTED), used


@dataclass(frozen=True)
class Used:
    """What the rows of a set that continues another one hold.

    Attributes:
        documents: USED_SCHEMA, those of training rows, by the leading bits of their ids.
        copies: how many entries of each source's stream are taken, a part of them at least.
    """

    documents: Shuffled
    copies: list[int]


def used_of(pieces: pa.Table, target: np.ndarray, training: int, sources: int, bits: int) -> tuple[Sent, list[int]]:
    """The documents of a segment's pieces that lie in the first `training` shards, and how many entries each source
    has of them."""
    trained = pieces.filter(pa.array(target < training))
    entries = trained.group_by(["source", "high", "low", "copy"]).aggregate([])
    copies = np.bincount(entries["source"].to_numpy(), minlength=sources)
    documents = entries.group_by(["high", "low"]).aggregate([]).select(["high", "low"]).cast(USED_SCHEMA)
    words = documents["high"].to_numpy()
    return Sent(
        USED, documents.combine_chunks(), leading(words, bits) if bits else np.zeros(len(words), dtype=np.int64)
    ), copies.tolist()


def _used_segments(streams: Streams, layouts: Sequence[Layout]) -> list[tuple[int, int]]:
    """The segments that any stream takes documents of; at least one."""
    ends = np.array([layout.end for layout in layouts])
    used = np.asarray(((streams.bases.begins < ends) & (streams.bases.entries > 0)).any(axis=2))
    used[0, 0] = True
    return [(number, partition) for number, partition in np.argwhere(used).tolist()]


def place_segment(
    task: Task,
    streams: Streams,
    shards: Shards,
    packing: Packing,
    ends: Sequence[Sequence[int]],
    plan: str,
    sends: bool = False,
    rearranging: Rearranging | None = None,
) -> Generator[Sent, None, Done]:
    """Cut a segment into pieces and send them to their shards: payload `pass`, `partition`.

    Args:
        sends: also tell the token parts what is wanted.
        rearranging: see `place`.
    """
    made = [_pieces_of(task, with_bases(streams, plan), shards, packing, ends, plan, rearranging)]
    if sends:
        yield wanted_of(*made[0])
    copies: list[int] = []
    if shards.before is not None:
        sent, copies = used_of(*made[0], shards.training, len(shards.sources), shards.ledger_bits)
        yield sent
    yield Sent(PLACE_JOB, *made.pop())  # not held here, while whoever gets it puts it in order
    return Done([], {"copies": copies})


def _pieces_of(
    task: Task,
    streams: Streams,
    shards: Shards,
    packing: Packing,
    ends: Sequence[Sequence[int]],
    plan: str,
    rearranging: Rearranging | None,
) -> tuple[pa.Table, np.ndarray]:
    """The pieces of a segment (PLACED_SCHEMA) and the shard of each: only these outlive the cutting."""
    number, partition = task.payload["pass"], task.payload["partition"]
    segment = streams.segment(number, partition)
    schema = PLACED_SCHEMA if rearranging is None else ENDS_SCHEMA
    tables, targets = [schema.empty_table()], [np.empty(0, dtype=np.int64)]
    for stream, of_stream in enumerate(ends):
        base = int(streams.bases.begins[number, partition, stream])
        own = segment.of(stream)
        if base >= of_stream[-1] or not len(own.tokens):
            continue
        source, trains = stream % len(shards.sources), stream < len(shards.sources)
        used = packing if trains else Packing(packing.sequence_length)
        saved = (as_path(plan) / f"stream-{stream:05d}", segment_name(number, partition))
        for pieces in _cut_phases(own.starts(base), of_stream, used, *saved):
            if trains:
                places = shards.places(source, pieces.row)
                if (places < 0).any():
                    laid = places >= 0
                    pieces, places = Pieces(*(getattr(pieces, name)[laid] for name in PIECE_COLUMNS)), places[laid]
                target, row = places // shards.shard_rows, places % shards.shard_rows
            else:
                target, row = np.full(len(pieces.row), shards.training + source), pieces.row
            copy = number * (shards.copies[source] if trains else 1) + own.time
            if rearranging is None:
                tables.append(_placed(own, pieces, row, source, copy))
            else:
                placed, piece = _placed_runs(own, pieces, row, source, copy, number, trains, rearranging)
                tables.append(placed)
                target = target[piece]
            targets.append(target)
    return pa.concat_tables(tables).combine_chunks(), np.concatenate(targets)


def _cut_phases(starts: np.ndarray, ends: Sequence[int], packing: Packing, folder: Path, name: str) -> Iterator[Pieces]:
    """The pieces of a segment; of each phase that it has a part of, where rests are dealt out."""
    if not (packing.best_fit or packing.aligned):
        yield cut(starts, 0, ends[-1], packing)
        return
    saved = load_record(folder, name, SavedPlaces)
    places = [
        Places(int(free), int(rows), ranks)
        for free, rows, ranks in zip(saved.free, saved.rows, saved.ranks, strict=True)
    ]
    if not packing.best_fit:
        yield cut(starts, 0, ends[-1], packing, places[0])
        return
    for phase, (begin, end) in enumerate(pairwise([0, *ends])):
        if begin < starts[-1] and end > starts[0]:
            dealing = load_record(folder, _dealing_name(phase), SavedDealing)
            first_row, whole = dealing.where.tolist()
            yield cut(
                starts, begin, end, packing, places[phase], Dealing(first_row, whole, dealing.begins, dealing.dealt)
            )


def _placed(own: Segment, pieces: Pieces, row: np.ndarray, source: int, copy: np.ndarray) -> pa.Table:
    """Pieces as PLACED_SCHEMA."""
    entry = pieces.entry
    text = np.minimum(pieces.length, own.tokens[entry] - pieces.offset)
    return pa.table(
        [
            row.astype(np.int32),
            pieces.length.astype(np.int32),
            own.words[entry, 0],
            own.words[entry, 1],
            np.full(len(entry), source, dtype=np.int32),
            copy[entry].astype(np.int32),
            pieces.offset,
            own.part[entry],
            own.offset[entry] + pieces.offset,
            text.astype(np.int32),
        ],
        schema=PLACED_SCHEMA,
    )


def _placed_runs(
    own: Segment,
    pieces: Pieces,
    row: np.ndarray,
    source: int,
    copy: np.ndarray,
    number: int,
    trains: bool,
    rearranging: Rearranging,
) -> tuple[pa.Table, np.ndarray]:
    """The runs of pieces as ENDS_SCHEMA, and the piece (int64) of each."""
    entry, used = np.unique(pieces.entry, return_inverse=True)
    words, time, tokens = own.words[entry], own.time[entry], own.tokens[entry]
    chosen = np.zeros(len(entry), dtype=bool)
    if trains:
        chosen = rearranging.chosen(np.full(len(entry), source), words, time)
    runs = rearranging.cut_pieces(
        chosen[used], words[used], time[used], number, (tokens - ADDED * chosen)[used], pieces.offset, pieces.length
    )
    of_run = pieces.entry[runs.piece]
    return pa.table(
        [
            row[runs.piece].astype(np.int32),
            runs.length.astype(np.int32),
            own.words[of_run, 0],
            own.words[of_run, 1],
            np.full(len(of_run), source, dtype=np.int32),
            copy[of_run].astype(np.int32),
            runs.offset,
            own.part[of_run],
            own.offset[of_run] + runs.source,
            runs.text.astype(np.int32),
            runs.end,
        ],
        schema=ENDS_SCHEMA,
    ), runs.piece
