"""Apache Iceberg tables as sources, written by pyiceberg."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.readers.readers import read_records
from gristmill.dataprep.readers.records import Reading, Record
from gristmill.dataprep.readers.sources import SourceError, find_files
from gristmill.mixtures.schema.sources import Source


@pytest.fixture
def table(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A table with two files in two snapshots."""
    from pyiceberg.catalog.memory import InMemoryCatalog

    catalog = InMemoryCatalog("test", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("web")
    rows = pa.table({"text": ["one", "two"], "url": ["a", "b"]})
    table = catalog.create_table("web.pages", schema=rows.schema)
    table.append(rows)
    table.append(pa.table({"text": ["three"], "url": ["c"]}))
    return table


def folder_of(table) -> Path:  # type: ignore[no-untyped-def]
    return Path(table.location().removeprefix("file://"))


def texts_of(folder: Path) -> list[str]:
    listed = find_files("web", Source(path=str(folder), format="iceberg"))
    reading = Reading(metadata=("url",))
    return sorted(
        item.text
        for file in listed.files
        for item in read_records(file, reading)
        if isinstance(item, Record)
    )


def test_records_are_those_of_the_current_snapshot(table) -> None:  # type: ignore[no-untyped-def]
    """Neither a file that a later snapshot replaced nor one that was never committed is
    read.
    """
    folder = folder_of(table)
    assert texts_of(folder) == ["one", "three", "two"]
    pq.write_table(pa.table({"text": ["stray"]}), folder / "data" / "stray.parquet")
    assert texts_of(folder) == ["one", "three", "two"]
    table.overwrite(pa.table({"text": ["four"], "url": ["d"]}))
    assert texts_of(folder) == ["four"]


def test_listing_names_the_files_relative_to_the_table(table) -> None:  # type: ignore[no-untyped-def]
    listed = find_files("web", Source(path=str(folder_of(table)), format="iceberg"))
    assert [file.format for file in listed.files] == ["parquet", "parquet"]
    assert all(file.name.startswith("data/") for file in listed.files)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("data/*.parquet", "is incomplete"),
        ("metadata/*.metadata.json", "not an Iceberg table"),
        ("metadata/*.avro", "cannot be listed"),
    ],
)
def test_damaged_table_is_an_error_that_names_the_source(
    table,  # type: ignore[no-untyped-def]
    damage: str,
    message: str,
) -> None:
    folder = folder_of(table)
    for path in folder.glob(damage):
        path.unlink()
    with pytest.raises(SourceError, match=f"source 'web'.*{message}"):
        texts_of(folder)


def test_row_deletions_are_refused(
    table,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyiceberg.table import FileScanTask, StaticTable

    tasks = list(table.scan().plan_files())
    deleting = FileScanTask(tasks[0].file, delete_files={tasks[1].file})

    class Scan:
        def plan_files(self) -> list[FileScanTask]:
            return [deleting]

    monkeypatch.setattr(StaticTable, "scan", lambda self: Scan())
    with pytest.raises(SourceError, match="compact the table"):
        texts_of(folder_of(table))
