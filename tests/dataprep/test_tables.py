"""Damaged tables lose only themselves, whatever they do to their reader."""

import io
import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.readers import compression, guarded, ingest
from gristmill.dataprep.readers.document_shards import Loss
from gristmill.dataprep.readers.parquet import TableReader, table_rows
from gristmill.dataprep.readers.readers import read_file, read_records
from gristmill.dataprep.readers.records import Ended, Read, Reading, Record, Rejected
from tests.dataprep.source_files import files_of, texts

RunIngest = Callable[..., ingest.IngestSummary]
ROWS = 300
SEED = int(os.environ.get("GRISTMILL_TEST_SEED", "7"))


def content(kind: str) -> bytes:
    table = pa.table(
        {
            "text": [f"row {n} of the mill" for n in range(ROWS)],
            "n": list(range(ROWS)),
            "kind": pa.array(["a", "b", "c"] * (ROWS // 3)).dictionary_encode(),
            "parts": [["x", "y"]] * ROWS,
        }
    )
    buffer = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, buffer, row_group_size=100)
        return buffer.getvalue()
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(
        buffer, table.schema
    ) as writer:
        for batch in table.to_batches(max_chunksize=50):
            writer.write_batch(batch)
    return buffer.getvalue()


def read(path: Path, tables: TableReader, reading: Reading | None = None) -> list[Read]:
    (file,) = files_of(path)
    return list(read_file(file, reading or Reading(), tables))


def errors(records: list[Read]) -> list[str]:
    return [record.error for record in records if isinstance(record, Rejected)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "file", "parquet"])
def test_flipped_bits_never_lose_rows_silently(tmp_path: Path, kind: str) -> None:
    rng = random.Random(f"{SEED} {kind}")
    intact = content(kind)
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    with TableReader() as tables:
        for _ in range(12):
            damaged = bytearray(intact)
            for _ in range(rng.choice([1, 8])):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(damaged))
            records = read(path, tables)
            (ended,) = [item for item in records if isinstance(item, Ended)]
            assert len(records) - 1 == ended.records
            assert ended.records == ROWS or ended.error
        path.write_bytes(intact)
        assert texts(read(path, tables)) == [
            f"row {n} of the mill" for n in range(ROWS)
        ]


def test_invalid_offsets_are_found_before_reading_rows(tmp_path: Path) -> None:
    offsets = pa.array([0, 3, 1 << 30, 6], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(
        pa.string(), 3, [None, offsets, pa.py_buffer(b"abcdef")]
    )
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        batch = pa.RecordBatch.from_arrays([column], ["text"])
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
    with TableReader() as tables:
        (rejected, ended) = read(tmp_path / "a.arrow", tables)
    assert isinstance(rejected, Rejected)
    assert "Arrow" in rejected.error
    assert rejected.lost == 2
    assert isinstance(ended, Ended)
    assert ended.error == rejected.error


def crashing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """End the reader process by a signal at every file whose name begins with `bad`."""
    program = tmp_path / "child.py"
    program.write_text(
        "import os, gristmill.dataprep.readers.table_child as child\n"
        "def parquet(path, about, original=child._parquet):\n"
        f"    if path.name.startswith('bad'): os.kill(os.getpid(), {number})\n"
        "    yield from original(path, about)\n"
        "child._parquet = parquet\n"
        "child.main()\n"
    )
    original = guarded.subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        return original([command[0], str(program), *command[3:]], **options)

    monkeypatch.setattr(guarded.subprocess, "Popen", started)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGSEGV, "signal 11"),
        (signal.SIGPROF, "60 s"),
    ],
)
def test_file_that_ends_its_reader_is_lost_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: str,
    run_ingest: RunIngest,
) -> None:
    crashing(monkeypatch, tmp_path, number)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "bad", "c"):
        (folder / f"{name}.parquet").write_bytes(content("parquet"))
    config = {
        "sources": {"web": {"path": str(folder)}},
        "ingest": {"max_quarantined": 0.5},
    }
    summary = run_ingest(config)
    assert summary.counts["kept"] == 2 * ROWS
    (damage,) = summary.damaged
    assert error in damage.error
    assert replace(damage, error="") == Loss(
        "web", "bad.parquet", records=1, lost=ROWS - 1, error=""
    )


@pytest.mark.slow
def test_table_that_needs_too_much_memory_is_lost_alone(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": ["x" * (200 << 20)]}),
        tmp_path / "a.parquet",
        compression="zstd",
    )
    (tmp_path / "b.parquet").write_bytes(content("parquet"))
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    with TableReader(memory_bytes=256 << 20) as tables:
        (error,) = errors(read(tmp_path / "a.parquet", tables))
        assert "256 MiB" in error
        assert len(texts(read(tmp_path / "b.parquet", tables))) == ROWS


def test_oversized_row_is_rejected_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "MAX_RECORD_BYTES", 1 << 20)
    pq.write_table(
        pa.table({"text": ["a", "x" * (2 << 20), "c"] * 20}), tmp_path / "a.parquet"
    )
    with TableReader() as tables:
        records = read(tmp_path / "a.parquet", tables)
    assert texts(records) == ["a", "c"] * 20
    assert len(errors(records)) == 20
    assert all("1 MiB" in error for error in errors(records))


def test_rows_that_are_not_utf8_are_repaired_or_rejected_alone(tmp_path: Path) -> None:
    long = b"The mill grinds. " * 20
    raw = pa.array([b"a", long + b"\xff", b"bad \xff", b"d"])
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    pq.write_table(
        pa.table({"text": text, "b": [b"\xff"] * 4, "s": ["é"] * 4}),
        tmp_path / "a.parquet",
    )
    with TableReader() as tables:
        records = read(tmp_path / "a.parquet", tables)
        strict = read(tmp_path / "a.parquet", tables, Reading(encoding_errors="strict"))
    assert texts(records) == ["a", long.decode() + "\ufffd", "d"]
    assert [record.replaced for record in records if isinstance(record, Record)] == [
        0,
        1,
        0,
    ]
    assert [
        json.loads(record.metadata) for record in records if isinstance(record, Record)
    ] == [{"s": "é"}] * 3
    (error,) = errors(records)
    assert "UTF-8: byte 0xff at position 4" in error
    assert texts(strict) == ["a", "d"]


def test_date_out_of_range_costs_only_its_row(tmp_path: Path) -> None:
    dates = pa.array([0, 1 << 60, 0], pa.timestamp("s"))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        table = pa.table({"text": ["a", "b", "c"], "date": dates})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    with TableReader() as tables:
        records = read(tmp_path / "a.arrow", tables)
    assert texts(records) == ["a", "c"]
    assert len(errors(records)) == 1


def test_tables_are_read_from_any_store_and_from_feather(tmp_path: Path) -> None:
    import pyarrow.feather as feather
    from upath import UPath

    path = UPath("memory://tables-test/a.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content("parquet"))
    (file,) = files_of("memory://tables-test/*.parquet")
    assert len(texts(list(read_records(file, Reading())))) == ROWS
    feather.write_feather(pa.table({"text": ["a", "b"]}), str(tmp_path / "a.feather"))
    with TableReader() as tables:
        assert texts(read(tmp_path / "a.feather", tables)) == ["a", "b"]


def test_table_is_read_from_a_url_with_a_long_query() -> None:
    from upath import UPath

    path = UPath(f"memory://tables-signed/a.parquet?signature={'x' * 300}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content("parquet"))
    with TableReader() as tables:
        batches = list(tables.batches(path, "parquet"))
    assert (
        sum(len(batch) for batch in batches if isinstance(batch, pa.RecordBatch))
        == ROWS
    )


def test_closing_a_table_early_ends_its_process(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(content("parquet"))
    with TableReader() as tables:
        rows = tables.batches(tmp_path / "a.parquet", "parquet")
        next(rows)
        child = tables._child
        assert child is not None
        rows.close()
        assert child.poll() is not None
        again = list(tables.batches(tmp_path / "a.parquet", "parquet"))
        assert (
            sum(len(batch) for batch in again if isinstance(batch, pa.RecordBatch))
            == ROWS
        )
        child = tables._child
        assert child is not None
    assert child.poll() is not None
    assert [number for number, _ in table_rows(tmp_path / "a.parquet")] == list(
        range(1, ROWS + 1)
    )
