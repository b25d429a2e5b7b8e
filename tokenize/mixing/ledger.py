"""Ledger of a mixture: the outcome of every tokenised document, in tables ordered by
id, with counts.

The draws of a document decide whether it is in a row: a stream takes all documents of
its first pass up to some draw (`Taken`), or all of them. Each partition of the ledger
(documents whose ids share their leading bits) is therefore independent of the others. A
task reads its partitions one by one, at most `streams.PARTITION_BYTES` each and about
five times as much while sorting, and appends them to its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.core.files import atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts, SourceCounts
from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.row_groups import read_matching
from gristmill.dataprep.runners.shuffle import Shuffled
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.dataprep.shuffle_format import columns_of
from gristmill.tokenize.document_sampling import (
    ordered_by,
    word_ids,
    words_of,
)
from gristmill.tokenize.mixing.candidates import HELD_OUT, TRAINS, Candidates
from gristmill.tokenize.mixing.source_filters import UNKNOWN
from gristmill.tokenize.mixing.streams import (
    Draws,
    Streams,
    stream_of,
)
from gristmill.tokenize.packed_files import (
    INDEX_GROUP_ROWS,
    LEDGER_SCHEMA,
    ids_name,
    ledger_name,
)
from gristmill.tokenize.packing.write_shards import WrittenShard

JOB = "documents"
FILE_DOCUMENTS = 1 << 26
"""Documents per table: a search through its 4,096 row groups takes less than a tenth of
a second, and Parquet allows at most 32,767 row groups.
"""
EXCLUDED, WITHHELD = "excluded", "withheld"
"""Reasons in the ledger: a document on the exclusion list; a document whose rows were
all emptied.
"""
RULES = (
    EXCLUDED,
    WITHHELD,
    "where",
    "where_unknown",
    "epochs",
    "epochs_unknown",
    "quota",
    "validation_rest",
)
"""Reasons why documents are in no row; the first that applies counts. In order: on the
exclusion list; all rows were emptied; the source's `where` is not met, or uses a column
that was not measured; the source's `epochs` is 0, or uses a column that was not
measured; the source's quota was full; the validation rows were full, or the remainder
fills no row.
"""


@dataclass(frozen=True)
class Taken:
    """Last document that each stream takes in its first pass.

    Attributes:
        any: bool of shape (streams,), whether the stream takes any document.
        complete: bool of shape (streams,), whether it takes all documents.
        draw: uint64 of shape (streams,), draw of the last document; id and time break
            ties.
        words: uint64 of shape (streams, 2), its id.
        time: int32 of shape (streams,), its repeat within the pass.
    """

    any: np.ndarray
    complete: np.ndarray
    draw: np.ndarray
    words: np.ndarray
    time: np.ndarray

    def used(
        self,
        words: np.ndarray,
        source: np.ndarray,
        state: np.ndarray,
        repeats: np.ndarray,
        draws: Draws,
    ) -> np.ndarray:
        """Mask of the documents that any stream takes: bool of shape (n,).

        Args:
            words: uint64 of shape (n, 2), ids of the documents (`id_words`).
            source: integers of shape (n,), their sources.
            state: integers of shape (n,): TRAINS, HELD_OUT, or neither.
            repeats: integers of shape (n,), their repeats in a pass over training rows.
            draws: of all streams.
        """
        held_out = state == HELD_OUT
        times = np.where(held_out, 1, np.where(state == TRAINS, repeats, 0))
        stream = stream_of(source.astype(np.int64), held_out, draws.sources)
        used = self.complete[stream] & (times > 0)
        undecided = self.any[stream] & ~used
        for time in range(int(times[undecided].max(initial=0))):
            selection = np.flatnonzero(undecided & (times > time) & ~used)
            streams = stream[selection]
            selected_words = words.take(selection, axis=0)
            drawn = draws.of(streams, selected_words, np.full(len(selection), time), 0)
            last = self.draw[streams]
            mask = drawn <= last
            # Equal draws are rare.
            for tied in np.flatnonzero(drawn == last):
                number = streams[tied]
                mask[tied] = (*selected_words[tied].tolist(), time) <= (
                    *self.words[number].tolist(),
                    int(self.time[number]),
                )
            used[selection] = mask
        return used


def last_taken(streams: Streams, ends: Sequence[int]) -> Taken:
    """Last document of each stream's first pass that begins before the stream's end."""
    number = len(ends)
    last_entries = Taken(
        np.zeros(number, bool),
        np.zeros(number, bool),
        np.zeros(number, np.uint64),
        np.zeros((number, 2), np.uint64),
        np.zeros(number, np.int32),
    )
    for stream, end in enumerate(ends):
        first_pass = [place for place in streams.places(stream, end) if not place[0]]
        if not first_pass:
            continue
        _, partition, base = first_pass[-1]
        segment = streams.segment(0, partition).of(stream)
        last = int(np.searchsorted(segment.starts(base)[:-1], end)) - 1
        words = segment.words[last : last + 1]
        time = segment.time[last : last + 1]
        later_entries = streams.bases.entries[0, partition + 1 :, stream]
        last_entries.any[stream] = True
        last_entries.complete[stream] = (
            last + 1 == len(segment.words) and not later_entries.any()
        )
        last_entries.draw[stream] = streams.draws.of(
            np.array([stream]), words, time, 0
        )[0]
        last_entries.words[stream] = words[0]
        last_entries.time[stream] = time[0]
    return last_entries


@dataclass(frozen=True)
class Emptied:
    """Ids (`pa.binary(ID_BYTES)`) of documents in emptied rows.

    Attributes:
        excluded: on the exclusion list.
        touched: in rows that were emptied.
        still: those of `touched` that are also in other rows.
    """

    excluded: pa.Array
    touched: pa.Array
    still: pa.Array


def find_emptied(
    out: Path, shards: Sequence[WrittenShard], excluded: Sequence[bytes]
) -> Emptied:
    """Collect the documents of emptied rows from all shards, training and held out.

    Args:
        out: the packed set's folder, with its shards.
        shards: all of them.
        excluded: document ids.
    """
    touched = {bytes.fromhex(digits) for shard in shards for digits in shard.touched}
    still = {
        document
        for shard in shards
        if touched
        for document in read_matching(
            out / ids_name(shard.entry["file"]), "id", [*touched], ["id"]
        )["id"].to_pylist()
    }
    return Emptied(
        *(
            pa.array(sorted(ids), pa.binary(ID_BYTES))
            for ids in (excluded, touched, still)
        )
    )


def write_ledger(
    candidates: Candidates,
    streams: Streams,
    last_entries: Taken,
    emptied: Emptied,
    sources: Sequence[str],
    out: Path,
    context: Context,
) -> tuple[Counts, dict[str, int], int]:
    """Write the tables of all documents of a mixture.

    Args:
        candidates: all documents.
        streams: of all sources.
        last_entries: see `last_taken`.
        emptied: see `find_emptied`.
        sources: names by number.
        out: the packed set's folder.
        context: of the jobs.

    Returns:
        the counts, by RULES (a document is kept if any of its tokens is in a row);
        documents of each source in training rows, emptied or not; and the number of
        tables.
    """
    tables = -(-candidates.documents // FILE_DOCUMENTS)
    bits = min(max(0, tables - 1).bit_length(), candidates.ledger_bits)
    partitions_per_table = 1 << (candidates.ledger_bits - bits)
    tasks = [
        Task(
            f"{number:05d}",
            {
                "file": ledger_name(number, 1 << bits),
                "first": number * partitions_per_table,
                "partitions": partitions_per_table,
            },
        )
        for number in range(1 << bits)
    ]
    process = partial(
        write_table_of,
        draws=streams.draws,
        last_entries=last_entries,
        emptied=emptied,
        ledger=candidates.ledger,
        out=out,
    )
    results = run_tasks(JOB, tasks, process, context)
    totals = np.sum([result["counts_"] for result in results], axis=0)
    counts = {name: _ledger_of(totals[number]) for number, name in enumerate(sources)}
    laid_out = dict(zip(sources, totals[:, LAID_OUT].tolist(), strict=True))
    return {**_ledger_of(totals.sum(axis=0)), "sources": counts}, laid_out, 1 << bits


READ, KEPT, BYTES_READ, BYTES_KEPT, LAID_OUT, FIRST_RULE = range(6)
"""Columns of a task's counts by source; the columns of the rules follow."""


def _ledger_of(counts: np.ndarray) -> SourceCounts:
    numbers: list[int] = counts.tolist()
    dropped = zip(RULES, numbers[FIRST_RULE:], strict=True)
    return {
        "read": numbers[READ],
        "kept": numbers[KEPT],
        "quarantined": 0,
        "dropped": {rule: number for rule, number in dropped if number},
        "bytes_read": numbers[BYTES_READ],
        "bytes_kept": numbers[BYTES_KEPT],
    }


def write_table_of(
    task: Task,
    draws: Draws,
    last_entries: Taken,
    emptied: Emptied,
    ledger: Shuffled,
    out: Path,
) -> Done:
    """Write one table: payload `file`, `first` (partition), `partitions`.

    Returns:
        `counts_`: by source, the columns READ to LAID_OUT and one for each rule.
    """
    counts = np.zeros((draws.sources, FIRST_RULE + len(RULES)), np.int64)
    path = out / task.payload["file"]
    first = task.payload["first"]
    tables = (
        _judged(ledger.read(partition), draws, last_entries, emptied, counts)
        for partition in range(first, first + task.payload["partitions"])
    )
    write_in_groups(path, tables)
    return Done([path], {"counts_": counts.tolist()})


def write_in_groups(path: Path, tables: Iterator[pa.Table]) -> None:
    """Write the parts of a table in full row groups: the same bytes as if written at
    once.
    """
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
            full_rows = len(waiting) // INDEX_GROUP_ROWS * INDEX_GROUP_ROWS
            if full_rows:
                writer.write_table(waiting.slice(0, full_rows), INDEX_GROUP_ROWS)
                waiting = waiting.slice(full_rows).combine_chunks()
                written = True
        if len(waiting) or not written:
            writer.write_table(waiting, INDEX_GROUP_ROWS)


def _judged(
    rows: pa.Table,
    draws: Draws,
    last_entries: Taken,
    emptied: Emptied,
    counts: np.ndarray,
) -> pa.Table:
    """Ledger entries of a partition, ordered by id; updates the counts."""
    columns = columns_of(rows)
    order = ordered_by(columns["high"], columns["low"])
    columns = {name: column[order] for name, column in columns.items()}
    words = words_of(columns)
    ids = word_ids(words)
    source, state, repeats = columns["source"], columns["state"], columns["repeats"]
    trains = state == TRAINS
    held_out = state == HELD_OUT
    used = last_entries.used(words, source, state, repeats, draws)
    laid_out = used & trains
    excluded = _among(ids, emptied.excluded)
    emptied_rows = _among(ids, emptied.touched) & ~_among(ids, emptied.still)
    withheld = used & ~excluded & emptied_rows
    used &= ~excluded & ~withheld
    masks = (
        excluded,
        withheld,
        ~trains & ~held_out & (state != UNKNOWN),
        state == UNKNOWN,
        trains & (repeats == 0),
        trains & (repeats == UNKNOWN),
        trains & (repeats > 0) & ~used,
        held_out & ~used,
    )
    reason = np.full(len(words), -1, np.int8)
    for number, mask in reversed([*enumerate(masks)]):
        reason[mask] = number
    size = columns["bytes"]
    counted = (
        np.ones(len(words)),
        used,
        size,
        used * size,
        laid_out,
        *(reason == rule for rule in range(len(RULES))),
    )
    for column, weights in enumerate(counted):
        # float64 sums are exact below 2**53 bytes per partition.
        totals = np.bincount(source, weights, minlength=len(counts))
        counts[:, column] += totals.astype(np.int64)
    return pa.table(
        [
            ids,
            columns["shard"],
            columns["row"],
            source,
            held_out,
            pa.DictionaryArray.from_arrays(
                pa.array(reason, pa.int8(), mask=reason < 0),
                pa.array(RULES, pa.string()),
            ),
        ],
        schema=LEDGER_SCHEMA,
    )


def _among(ids: pa.Array, documents: pa.Array) -> np.ndarray:
    """Mask (bool) of the ids that are in a list."""
    matches = pc.is_in(ids, value_set=documents)
    return np.asarray(matches.to_numpy(zero_copy_only=False), bool)
