"""Memory of the tasks of a mixture: a stated number of bytes for each document of a
partition.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gristmill.dataprep.runners.shuffle import Shuffled, send_to_files
from gristmill.dataprep.runners.tasks import Task
from gristmill.dataprep.shuffle_format import by_partition, task_file, write_batches
from gristmill.tokenize.mixing import ledger, streams
from gristmill.tokenize.mixing.candidates import (
    CANDIDATE_BYTES,
    CANDIDATES_SCHEMA,
    TRAINS,
)
from gristmill.tokenize.mixing.streams import (
    ENTRIES_SCHEMA,
    ENTRY_BYTES,
    Bases,
    Draws,
    Streams,
    sort_segment,
)
from gristmill.tokenize.packing import row_layout, write_shards
from gristmill.tokenize.packing.array_files import save
from gristmill.tokenize.packing.packing import Packing
from gristmill.tokenize.packing.row_layout import (
    PLACE_JOB,
    Shards,
    lay_out_stream,
    place_segment,
)
from gristmill.tokenize.packing.write_shards import (
    RowPlan,
    write_train_shard,
)

NUMBER, TOKENS, LENGTH = 200_000, 44, 512
PIECE_BYTES = 250
"""Memory of a task per piece of its shard: its location, as read and sorted, and its
two tables.
"""
DRAWS = Draws(1, 7, 8)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak size of arrays and tables that a function allocates."""
    work()  # compiles kernels, imports
    default_pool = pa.default_memory_pool()
    counting_pool = pa.proxy_memory_pool(default_pool)
    pa.set_memory_pool(counting_pool)
    tracemalloc.start()
    try:
        work()
        array_bytes: int = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(default_pool)
    return array_bytes + int(counting_pool.max_memory())


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A partition of entries and one of the ledger, sorted and laid out."""
    work, rng = tmp_path_factory.mktemp("plan"), np.random.default_rng(4)
    words = rng.integers(0, 2**64, (NUMBER, 2), dtype=np.uint64)
    zeros, tokens = np.zeros(NUMBER, np.int32), np.full(NUMBER, TOKENS)
    rows = np.arange(NUMBER)
    for name, schema, columns in (
        (
            "entries",
            ENTRIES_SCHEMA,
            [zeros, words[:, 0], words[:, 1], zeros, zeros, rows * TOKENS, tokens],
        ),
        (
            "ledger",
            CANDIDATES_SCHEMA,
            [
                words[:, 0],
                words[:, 1],
                zeros,
                rows,
                zeros,
                np.full(NUMBER, TRAINS, np.int8),
                np.ones(NUMBER, np.int32),
                tokens * 4,
            ],
        ),
    ):
        table = pa.table(columns, schema=schema)
        write_batches(task_file(work, name, "0"), *by_partition(table, zeros, 1))
    rng.integers(0, 255, NUMBER * TOKENS, dtype=np.uint16).tofile(work / "part.bin")
    sort(work)
    total = np.array([[[NUMBER * (TOKENS + 1), 0]]])
    save(
        work / "plan",
        "bases",
        Bases(total, np.array([[[NUMBER, 0]]]), np.zeros_like(total)),
    )

    return work


def sort(work: Path) -> None:
    sort_segment(
        Task("00000", {"partition": 0}),
        DRAWS,
        0,
        0,
        shuffled_from(work, "entries", "0"),
        work / streams.SEGMENTS,
    )


def shuffled_from(work: Path, name: str, task: str) -> Shuffled:
    return Shuffled(work / name, 1, [f"{task}.arrow"])


def streams_of(work: Path) -> Streams:
    empty = np.empty((0, 0, 0), np.int64)
    return Streams(work, 0, DRAWS, Bases(empty, empty, empty))


ROWS = NUMBER * (TOKENS + 1) // LENGTH
SHARDS = Shards(1, ("a",), ((ROWS,),), ROWS, (1,))


def place(work: Path) -> None:
    packing, end = Packing(LENGTH), [ROWS * LENGTH]
    lay_out_stream(
        Task("00000", {"stream": 0, "ends": end}),
        streams_of(work),
        packing,
        1,
        work / "plan",
    )
    place_rows = partial(
        place_segment,
        streams=streams_of(work),
        shards=SHARDS,
        packing=packing,
        ends=[end, [0]],
        plan=work / "plan",
    )
    send_to_files(
        place_rows,
        str(work),
        {PLACE_JOB: 2},
        Task("00000", {"pass": 0, "partition": 0}),
    )


def test_sorting_a_partition_takes_at_most_three_times_its_entries(
    planned: Path,
) -> None:
    assert peak_bytes(lambda: sort(planned)) < 3 * ENTRY_BYTES * NUMBER


def test_placing_a_segment_takes_at_most_seven_times_its_entries(planned: Path) -> None:
    assert peak_bytes(lambda: place(planned)) < 7 * ENTRY_BYTES * NUMBER
    pieces = NUMBER + ROWS
    placed = shuffled_from(planned, PLACE_JOB, "00000-0").read(0)
    assert NUMBER <= len(placed) <= pieces
    assert sum(field.type.bit_width // 8 for field in row_layout.PLACED_SCHEMA) == 56


def test_writing_a_shard_takes_at_most_piece_bytes_per_piece(
    planned: Path, tmp_path: Path
) -> None:
    place(planned)
    plan = RowPlan(
        shuffled_from(planned, PLACE_JOB, "00000-0"),
        str(tmp_path),
        (str(planned / "part.bin"),),
        "uint16",
        LENGTH,
        256,
        257,
    )
    task = Task(
        "0", {"file": "train-00000.bin", "partition": 0, "first": 0, "rows": ROWS}
    )
    pieces = NUMBER + ROWS
    assert (
        peak_bytes(lambda: write_train_shard(task, plan))
        < PIECE_BYTES * pieces + 4 * write_shards.BLOCK_BYTES
    )


def test_writing_a_ledger_takes_at_most_five_times_its_rows(
    planned: Path, tmp_path: Path
) -> None:
    task = Task("0", {"file": "documents.parquet", "first": 0, "partitions": 1})
    entries = shuffled_from(planned, "ledger", "0")
    last_entries = ledger.Taken(
        np.array([True, False]),
        np.array([False, False]),
        np.array([2**63, 0], np.uint64),
        np.zeros((2, 2), np.uint64),
        np.array([0, 0]),
    )
    emptied = ledger.Emptied(*[pa.array([], pa.binary(16))] * 3)
    peak = peak_bytes(
        lambda: ledger.write_table_of(
            task, DRAWS, last_entries, emptied, entries, tmp_path
        )
    )
    assert peak < 5 * CANDIDATE_BYTES * NUMBER
