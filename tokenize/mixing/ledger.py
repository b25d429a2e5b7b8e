"""The ledger of a mixture: what became of every tokenised document, in tables ordered by id, and counted.

Whether a document is in a row follows from its draws alone: a stream takes the documents up to some draw of its first
pass (`Taken`), or all of them. So a partition of the ledger, which has the documents whose ids begin with the same
bits, needs to know nothing of any other. A task reads one after the other, at most `streams.PARTITION_BYTES` and about
five times as much while it sorts them, and appends it to its table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import Counts
from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.files import as_path, atomic_write
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks
from gristmill.dataprep.jobs.shuffled import Shuffled
from gristmill.dataprep.row_groups import read_matching
from gristmill.tokenize.document_sampling import id_words, ordered_by, word_ids
from gristmill.tokenize.mixing.candidates import HELD_OUT, TRAINS, Candidates
from gristmill.tokenize.mixing.exclude import among
from gristmill.tokenize.mixing.plan_files import load_record, save
from gristmill.tokenize.mixing.streams import Draws, Streams, train_stream, validation_stream
from gristmill.tokenize.mixing.where import UNKNOWN
from gristmill.tokenize.packed_files import INDEX_GROUP_ROWS, LEDGER_SCHEMA, ids_name, ledger_name

JOB = "documents"
FILE_DOCUMENTS = 1 << 26
"""Documents of one table: its 4,096 row groups are looked through within a tenth of a second, and Parquet counts no
more than 32,767 of them."""
EXCLUDED, WITHHELD = "excluded", "withheld"
"""Reasons in the ledger: on the list itself; in no row but emptied ones."""
RULES = (EXCLUDED, WITHHELD, "where", "where_unknown", "epochs", "epochs_unknown", "quota", "validation_rest")
"""Why documents are in no row, the first that holds: their rows were emptied, their source's condition is not met, or
asks for what was not measured, their source takes them no times, or by what was not measured; they may train, but their
source's share was full; they are held out, but the validation rows were full, or too little for one more."""


@dataclass(frozen=True)
class Taken:
    """Up to which document of its first pass each stream is taken.

    Attributes:
        any: bool of shape (streams,), whether any is.
        whole: bool of shape (streams,), whether all are.
        draw: uint64 of shape (streams,), the last one's draw; at equal draws its id and time decide.
        words: uint64 of shape (streams, 2), its id.
        time: int32 of shape (streams,), which time of it this is.
    """

    any: np.ndarray
    whole: np.ndarray
    draw: np.ndarray
    words: np.ndarray
    time: np.ndarray

    def holds(self, stream: np.ndarray, draws: np.ndarray, words: np.ndarray, time: int) -> np.ndarray:
        """Which entries of the first pass (bool) are taken."""
        last = self.draw[stream]
        held = self.any[stream] & (draws <= last)
        # Two draws are hardly ever equal.
        for tied in np.flatnonzero(held & (draws == last)):
            one = stream[tied]
            held[tied] = (*words[tied].tolist(), time) <= (*self.words[one].tolist(), int(self.time[one]))
        return held


def last_taken(streams: Streams, ends: Sequence[int]) -> Taken:
    """Up to where the first pass of each stream goes, of which the tokens before an end are taken."""
    number = len(ends)
    taken = Taken(
        np.zeros(number, bool),
        np.zeros(number, bool),
        np.zeros(number, np.uint64),
        np.zeros((number, 2), np.uint64),
        np.zeros(number, np.int32),
    )
    for stream, end in enumerate(ends):
        for of_pass, partition, base in reversed([*streams.places(stream, end)]):
            if of_pass:
                continue
            segment = streams.segment(of_pass, partition).of(stream)
            last = int(np.searchsorted(segment.starts(base)[:-1], end)) - 1
            taken.any[stream], taken.words[stream], taken.time[stream] = True, segment.words[last], segment.time[last]
            taken.draw[stream] = streams.draws.of(
                np.array([stream]), segment.words[last : last + 1], segment.time[last : last + 1], 0
            )[0]
            behind = streams.bases.entries[0, partition + 1 :, stream]
            taken.whole[stream] = last + 1 == len(segment.words) and not behind.any()
            break
    return taken


@dataclass(frozen=True)
class Emptied:
    """Ids (uint64 of shape (n, 2), see `id_words`) that matter where rows were emptied; as many as these rows hold.

    Attributes:
        excluded: on the list.
        touched: in rows that were emptied.
        still: of these, in other rows too.
    """

    excluded: np.ndarray
    touched: np.ndarray
    still: np.ndarray


def find_emptied(out: Path, entries: Sequence[Mapping[str, Any]], excluded: Sequence[bytes]) -> Emptied:
    """What the shards, training and held out, say of the rows that were emptied.

    Args:
        out: the packed set's folder, its shards written.
        entries: of all shards.
        excluded: document ids.
    """
    touched = {bytes.fromhex(one) for entry in entries for one in entry.get("touched", ())}
    still = {
        one
        for entry in entries
        if touched
        for one in read_matching(out / ids_name(entry["file"]), "id", [*touched], ["id"])["id"].to_pylist()
    }
    return Emptied(*(_words_of(ids) for ids in (excluded, touched, still)))


def _words_of(ids: Collection[bytes]) -> np.ndarray:
    return id_words(pa.array(sorted(set(ids)), pa.binary(ID_BYTES)))


def write_ledger(
    candidates: Candidates,
    streams: Streams,
    taken: Taken,
    emptied: Emptied,
    sources: Sequence[str],
    out: Path,
    context: Context,
    used: Shuffled | None = None,
) -> tuple[Counts, dict[str, int], int]:
    """Write the tables of all documents of a mixture.

    Args:
        candidates: all documents.
        streams: of all sources.
        taken: see `last_taken`.
        emptied: see `find_emptied`.
        sources: names by number.
        out: the packed set's folder.
        context: where to run.
        used: the documents that training rows hold, by the leading bits of their ids, where that does not follow from
            `taken`.

    Returns:
        the counts, by RULES: a document is kept if any of its tokens is in a row; how many documents of each source
        were put in training rows, whether emptied or not; and how many tables there are.
    """
    if used is not None:
        trained = train_stream(np.arange(len(sources)))
        taken.any[trained], taken.whole[trained] = False, False
    save(context.work / "plan", "taken", taken)
    save(context.work / "plan", "emptied", emptied)
    tables = -(-candidates.documents // FILE_DOCUMENTS)
    bits = min(max(0, tables - 1).bit_length(), candidates.ledger_bits)
    each = 1 << (candidates.ledger_bits - bits)
    tasks = [
        Task(f"{number:05d}", {"file": ledger_name(number, 1 << bits), "first": number * each, "partitions": each})
        for number in range(1 << bits)
    ]
    process = partial(
        write_table_of,
        draws=streams.draws,
        plan=str(context.work / "plan"),
        sources=len(sources),
        ledger=candidates.ledger,
        out=str(out),
        documents=used,
    )
    results = run_tasks(JOB, tasks, process, context, direct=True)
    found = np.sum([result["counts_"] for result in results], axis=0)
    counts = {name: _ledger_of(found[number]) for number, name in enumerate(sources)}
    laid_out = {name: int(found[number, LAID_OUT]) for number, name in enumerate(sources)}
    return {**_ledger_of(found.sum(axis=0)), "sources": counts}, laid_out, 1 << bits


READ, KEPT, BYTES_READ, BYTES_KEPT, LAID_OUT, FIRST_RULE = range(6)
"""What a task counts of each source, before the rules."""


def _ledger_of(found: np.ndarray) -> dict[str, Any]:
    dropped = {rule: int(number) for rule, number in zip(RULES, found[FIRST_RULE:], strict=True) if number}
    return {
        "read": int(found[READ]),
        "kept": int(found[KEPT]),
        "quarantined": 0,
        "dropped": dropped,
        "bytes_read": int(found[BYTES_READ]),
        "bytes_kept": int(found[BYTES_KEPT]),
    }


def write_table_of(
    task: Task, draws: Draws, plan: str, sources: int, ledger: Shuffled, out: str, documents: Shuffled | None = None
) -> Done:
    """Write one table: payload `file`, `first` (partition), `partitions`.

    Returns:
        `counts_`: per source the numbers that READ and the others name.
    """
    taken, emptied = load_record(plan, "taken", Taken), load_record(plan, "emptied", Emptied)
    counts = np.zeros((sources, FIRST_RULE + len(RULES)), dtype=np.int64)
    path = as_path(out) / task.payload["file"]
    partitions = range(task.payload["first"], task.payload["first"] + task.payload["partitions"])

    def tables() -> Iterator[pa.Table]:
        for partition in partitions:
            held = None if documents is None else documents.read(partition)
            yield _judged(ledger.read(partition), draws, taken, emptied, counts, held)

    write_in_groups(path, tables())
    return Done([path], {"counts_": counts.tolist()})


def write_in_groups(path: Path, tables: Iterator[pa.Table]) -> None:
    """Write a table whose rows come in parts, each a row group at a time: the same bytes as from all of it at once."""
    waiting = LEDGER_SCHEMA.empty_table()
    with (
        atomic_write(path) as sink,
        pq.ParquetWriter(
            sink,
            LEDGER_SCHEMA,
            compression="zstd",
            write_page_checksum=True,
            use_dictionary=["shard", "source", "reason"],
        ) as writer,
    ):
        written = False
        for table in tables:
            waiting = pa.concat_tables([waiting, table])
            whole = len(waiting) // INDEX_GROUP_ROWS * INDEX_GROUP_ROWS
            if whole:
                writer.write_table(waiting.slice(0, whole), INDEX_GROUP_ROWS)
                waiting, written = waiting.slice(whole).combine_chunks(), True
        if len(waiting) or not written:
            writer.write_table(waiting, INDEX_GROUP_ROWS)


def _judged(
    rows: pa.Table, draws: Draws, taken: Taken, emptied: Emptied, counts: np.ndarray, held: pa.Table | None
) -> pa.Table:
    """The ledger's entries of a partition, ordered by id; adds to the counts. `held`: see `write_ledger`."""
    columns = {name: rows[name].to_numpy() for name in rows.column_names}
    order = ordered_by(columns["high"], columns["low"])
    columns = {name: column[order] for name, column in columns.items()}
    words = np.stack([columns["high"], columns["low"]], axis=1)
    source, state, repeats = columns["source"], columns["state"], columns["repeats"]
    used = _used(words, source, state, repeats, draws, taken)
    if held is not None:
        ids = word_ids(np.stack([held["high"].to_numpy(), held["low"].to_numpy()], axis=1))
        used |= (state == TRAINS) & pc.is_in(word_ids(words), value_set=ids).to_numpy(zero_copy_only=False)
    laid_out = used & (state == TRAINS)
    excluded = _among(words, emptied.excluded)
    gone = used & ~excluded & _among(words, emptied.touched) & ~_among(words, emptied.still)
    used &= ~excluded & ~gone
    trains, held_out = state == TRAINS, state == HELD_OUT
    masks = (
        excluded,
        gone,
        ~trains & ~held_out & (state != UNKNOWN),
        state == UNKNOWN,
        trains & (repeats == 0),
        trains & (repeats == UNKNOWN),
        trains & (repeats > 0) & ~used,
        held_out & ~used,
    )
    reason = np.full(len(words), -1, dtype=np.int8)
    for number, mask in reversed([*enumerate(masks)]):
        reason[mask] = number
    _count(counts, source, reason, used, laid_out, columns["bytes"])
    return pa.table(
        [
            word_ids(words),
            columns["shard"],
            columns["row"],
            source,
            held_out,
            pa.DictionaryArray.from_arrays(pa.array(reason, pa.int8(), mask=reason < 0), pa.array(RULES, pa.string())),
        ],
        schema=LEDGER_SCHEMA,
    )


def _used(
    words: np.ndarray, source: np.ndarray, state: np.ndarray, repeats: np.ndarray, draws: Draws, taken: Taken
) -> np.ndarray:
    """Which documents (bool) any stream has taken."""
    held_out = state == HELD_OUT
    times = np.where(held_out, 1, np.where(state == TRAINS, repeats, 0))
    stream = np.where(held_out, validation_stream(source, draws.sources), train_stream(source)).astype(np.int64)
    used = taken.whole[stream] & (times > 0)
    in_question = taken.any[stream] & ~used
    for time in range(int(times[in_question].max(initial=0))):
        these = np.flatnonzero(in_question & (times > time) & ~used)
        own = words.take(these, axis=0)
        drawn = draws.of(stream[these], own, np.full(len(these), time), 0)
        used[these] = taken.holds(stream[these], drawn, own, time)
    return used


def _among(words: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Which ids (bool) are among some; both as words."""
    marked = np.zeros(len(words), dtype=bool)
    if len(wanted):
        near = np.flatnonzero(np.isin(words[:, 0], wanted[:, 0]))
        hit = among(word_ids(words[near]), word_ids(wanted).to_pylist()).to_numpy(zero_copy_only=False)
        marked[near[np.asarray(hit, dtype=bool)]] = True
    return marked


def _count(
    counts: np.ndarray, source: np.ndarray, reason: np.ndarray, used: np.ndarray, laid_out: np.ndarray, size: np.ndarray
) -> None:
    number = len(counts)
    for column, chosen in ((READ, np.ones(len(source), dtype=bool)), (KEPT, used), (LAID_OUT, laid_out)):
        counts[:, column] += np.bincount(source[chosen], minlength=number)
    for column, chosen in ((BYTES_READ, np.ones(len(source), dtype=bool)), (BYTES_KEPT, used)):
        # The sums are exact below 2**53 bytes, of one partition.
        counts[:, column] += np.bincount(source[chosen], size[chosen], minlength=number).astype(np.int64)
    for rule in range(len(RULES)):
        counts[:, FIRST_RULE + rule] += np.bincount(source[reason == rule], minlength=number)
