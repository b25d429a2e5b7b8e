"""Damaged tables lose themselves, whatever they do to their reader."""

import io
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.reading import compression, guarded, ingest
from gristmill.dataprep.reading.readers import read_file, read_records
from gristmill.dataprep.reading.records import Ended, Read, Reading, Record, Rejected
from gristmill.dataprep.reading.sources import find_files
from gristmill.dataprep.reading.table_guard import TableReader
from gristmill.dataprep.reading.tables import table_rows

MakeContext = Callable[..., Context]
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
    sink = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, sink, row_group_size=100)
        return sink.getvalue()
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=50):
            writer.write_batch(batch)
    return sink.getvalue()


def read(path: Path, tables: TableReader, reading: Reading | None = None) -> list[Read]:
    (file,) = find_files("s", {"path": str(path)}).files
    return list(read_file(file, reading or Reading(), tables))


def texts(records: list[Read]) -> list[str]:
    return [record.text for record in records if isinstance(record, Record)]


def errors(records: list[Read]) -> list[str]:
    return [record.error for record in records if isinstance(record, Rejected)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "file", "parquet"])
def test_flipped_bits_raise_nothing_and_are_never_silent_about_lost_rows(tmp_path: Path, kind: str) -> None:
    draw = random.Random(f"{SEED} {kind}")
    print("seed", SEED)
    whole = content(kind)
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    with TableReader() as tables:
        for _ in range(12):
            damaged = bytearray(whole)
            for _ in range(draw.choice([1, 8])):
                damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
            path.write_bytes(bytes(damaged))
            records = read(path, tables)
            (ended,) = [item for item in records if isinstance(item, Ended)]
            assert len(records) - 1 == ended.records
            assert ended.records == ROWS or ended.error
        path.write_bytes(whole)
        assert texts(read(path, tables)) == [f"row {n} of the mill" for n in range(ROWS)]


def test_offsets_that_point_outside_of_their_column_are_found_before_a_row_is_read(tmp_path: Path) -> None:
    offsets = pa.array([0, 3, 1 << 30, 6], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abcdef")])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        batch = pa.RecordBatch.from_arrays([column], ["text"])
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
    with TableReader() as tables:
        (rejected, ended) = read(tmp_path / "a.arrow", tables)
    assert isinstance(rejected, Rejected)
    assert rejected.error.startswith("the Arrow file is damaged: ")
    assert rejected.lost == 2
    assert isinstance(ended, Ended)
    assert ended.error == rejected.error


def crashing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """Have the process end by a signal at every file whose name begins with `bad`."""
    program = tmp_path / "child.py"
    program.write_text(
        "import os, gristmill.dataprep.reading.table_child as child\n"
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
        (signal.SIGSEGV, "it crashed its reader (signal 11)"),
        (signal.SIGPROF, "a batch of its rows took more than 60 s"),
    ],
)
def test_a_file_that_ends_its_reader_is_lost_alone_and_named(
    tmp_path: Path, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, number: int, error: str
) -> None:
    crashing(monkeypatch, tmp_path, number)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "bad", "c"):
        (folder / f"{name}.parquet").write_bytes(content("parquet"))
    config = {"sources": {"web": {"path": str(folder)}}, "ingest": {"max_quarantined": 0.5}}
    summary = ingest.run({}, config, tmp_path / "out", make_context("work"))
    assert summary["counts"]["kept"] == 2 * ROWS
    assert summary["damaged"] == [
        {
            "source": "web",
            "file": "bad.parquet",
            "records": 1,
            "lost": ROWS - 1,
            "error": f"the Parquet file is damaged: {error}",
        }
    ]


@pytest.mark.slow
def test_a_table_that_needs_too_much_memory_is_lost_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * (200 << 20)]}), tmp_path / "a.parquet", compression="zstd")
    (tmp_path / "b.parquet").write_bytes(content("parquet"))
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    with TableReader(memory_bytes=256 << 20) as tables:
        assert errors(read(tmp_path / "a.parquet", tables)) == [
            "the Parquet file is damaged: reading it needed more than 256 MiB of memory"
        ]
        assert len(texts(read(tmp_path / "b.parquet", tables))) == ROWS


def test_a_row_longer_than_allowed_is_refused_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "MAX_RECORD_BYTES", 1 << 20)
    pq.write_table(pa.table({"text": ["a", "x" * (2 << 20), "c"] * 20}), tmp_path / "a.parquet")
    with TableReader() as tables:
        records = read(tmp_path / "a.parquet", tables)
    assert texts(records) == ["a", "c"] * 20
    assert errors(records) == ["the row is longer than 1 MiB"] * 20


def test_what_a_footer_says_of_its_rows_is_what_a_damage_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content("parquet"))
    damaged = bytearray(path.read_bytes())
    page = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    damaged[page : page + 50] = b"\xff" * 50
    path.write_bytes(bytes(damaged))
    with TableReader() as tables:
        records = read(path, tables)
    (ended,) = [item for item in records if isinstance(item, Ended)]
    assert ended.error
    assert ended.lost is not None
    assert (len(texts(records)) >= 100, ended.records + ended.lost) == (True, ROWS)


def test_rows_that_are_not_utf8_are_mended_or_quarantined_alone(tmp_path: Path) -> None:
    long = b"The mill grinds. " * 20
    raw = pa.array([b"a", long + b"\xff", b"bad \xff", b"d"])
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    pq.write_table(pa.table({"text": text, "b": [b"\xff"] * 4, "s": ["é"] * 4}), tmp_path / "a.parquet")
    with TableReader() as tables:
        records = read(tmp_path / "a.parquet", tables)
        strict = read(tmp_path / "a.parquet", tables, Reading(encoding_errors="strict"))
    assert texts(records) == ["a", long.decode() + "\ufffd", "d"]
    assert [record.replaced for record in records if isinstance(record, Record)] == [0, 1, 0]
    assert [json.loads(record.metadata) for record in records if isinstance(record, Record)] == [{"s": "é"}] * 3
    assert errors(records) == ["not valid UTF-8: byte 0xff at position 4"]
    assert texts(strict) == ["a", "d"]


def test_a_date_that_python_does_not_have_costs_its_row_alone(tmp_path: Path) -> None:
    dates = pa.array([0, 1 << 60, 0], pa.timestamp("s"))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        table = pa.table({"text": ["a", "b", "c"], "date": dates})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    with TableReader() as tables:
        records = read(tmp_path / "a.arrow", tables)
    assert texts(records) == ["a", "c"]
    assert len(errors(records)) == 1
    assert errors(records)[0].startswith("the row cannot be read: ")


def test_tables_are_read_from_any_store_and_feather_is_arrow(tmp_path: Path) -> None:
    import pyarrow.feather as feather
    from upath import UPath

    path = UPath("memory://tables-test/a.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content("parquet"))
    (file,) = find_files("s", {"path": "memory://tables-test/*.parquet"}).files
    assert len(texts(list(read_records(file, Reading())))) == ROWS
    feather.write_feather(pa.table({"text": ["a", "b"]}), str(tmp_path / "a.feather"))
    with TableReader() as tables:
        assert texts(read(tmp_path / "a.feather", tables)) == ["a", "b"]


def test_a_table_that_ends_before_all_its_rows_were_wanted_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(content("parquet"))
    with TableReader() as tables:
        rows = tables.batches(tmp_path / "a.parquet", "parquet")
        next(rows)
        child = tables._child
        assert child is not None
        rows.close()
        assert child.poll() is not None
        again = list(tables.batches(tmp_path / "a.parquet", "parquet"))
        assert sum(len(batch) for batch in again if isinstance(batch, pa.RecordBatch)) == ROWS
        child = tables._child
        assert child is not None
    assert child.poll() is not None
    assert [number for number, _ in table_rows(tmp_path / "a.parquet")] == list(range(1, ROWS + 1))
