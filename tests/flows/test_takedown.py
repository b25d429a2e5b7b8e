"""Documents selected by a takedown list."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.documents import document_id, write_table
from gristmill.flows.questions.find_documents import find_document
from gristmill.flows.questions.takedown import (
    TakedownError,
    find_documents,
    near_duplicates,
    read_list,
)
from tests.dataprep.document_shards import write_shards

RECORD = "#11111111-2222-3333-4444-555555555555"
LOCATORS = [
    "https://a.example/x" + RECORD,
    "https://a.example/x" + RECORD.replace("1", "9"),
    "b.jsonl#0",
    "c.txt",
]
IDS = [document_id("web", locator, locator) for locator in LOCATORS]


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """Four documents in two shards; the last two are near-duplicates, of which the last
    one was dropped.
    """
    documents = [("web", locator, locator) for locator in LOCATORS]
    write_shards(tmp_path / "ingest", [documents[:2], documents[2:]])
    for shard, rows in enumerate(([0, 1], [2, 3])):
        clusters = [IDS[2] if row > 1 else IDS[row] for row in rows]
        columns = {
            "id": pa.array([IDS[row] for row in rows], pa.binary(16)),
            "keep": [row < 3 for row in rows],
            "cluster": pa.array(clusters, pa.binary(16)),
        }
        path = tmp_path / "dedup" / f"part-{shard:05d}.parquet"
        write_table(path, pa.table(columns))
    write_table(
        tmp_path / "dedup" / "clusters.parquet",
        pa.table(
            {
                name: pa.array([value], pa.binary(16))
                for name, value in (
                    ("cluster", IDS[2]),
                    ("survivor", IDS[2]),
                    ("member", IDS[3]),
                )
            }
        ),
    )
    return {name: tmp_path / name for name in ("ingest", "dedup")}


def test_documents_are_found_by_id_locator_or_url_and_unmatched_names_are_returned(
    inputs: dict[str, Path],
) -> None:
    documents, missing = find_documents(
        inputs, [IDS[3].hex().upper(), "https://a.example/x", "b.jsonl#9", "0" * 32]
    )
    assert {id_: document.shard for id_, document in documents.items()} == {
        IDS[0]: "part-00000.parquet",
        IDS[1]: "part-00000.parquet",
        IDS[3]: "part-00001.parquet",
    }
    assert missing == ["b.jsonl#9", "0" * 32]
    assert set(find_documents(inputs, [LOCATORS[0], "c.txt"])[0]) == {IDS[0], IDS[3]}


def test_documents_are_found_by_url_in_metadata(
    inputs: dict[str, Path],
) -> None:
    """Documents from rows of a file have their address in the metadata, as `trace`
    shows it.
    """
    shard = inputs["ingest"] / "part-00001.parquet"
    table = pq.read_table(shard)
    rows = ['{"url": "https://b.example/2"}', '{"title": "no address"}']
    write_table(
        shard,
        table.set_column(
            table.schema.get_field_index("metadata"),
            "metadata",
            pa.array(rows, table.schema.field("metadata").type),
        ),
    )
    documents, missing = find_documents(
        inputs, ["https://b.example/2", "https://b.example/3"]
    )
    assert (list(documents), missing) == ([IDS[2]], ["https://b.example/3"])
    place = find_document(inputs, "https://b.example/2")
    assert place is not None
    assert place[1:] == ("part-00001.parquet", 0)
    assert find_document(inputs, "https://b.example/3") is None


def test_document_is_not_found_without_its_corpus(
    tmp_path: Path,
) -> None:
    assert find_document({"mix": tmp_path}, "0" * 32) is None


def test_near_duplicates_are_found_from_the_survivor_and_from_the_dropped(
    inputs: dict[str, Path],
) -> None:
    assert near_duplicates(inputs, [IDS[2]]) == {IDS[3]}
    assert near_duplicates(inputs, [IDS[3], IDS[0]]) == {IDS[2]}
    assert near_duplicates({"ingest": inputs["ingest"]}, [IDS[2]]) == set()


def test_takedown_list_accepts_names_or_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text('# why\n\nabc\n{"url": "https://a.example"}\nabc\n{"id": "#1"}\n')
    assert read_list(path) == ["abc", "https://a.example", "#1"]
    path.write_text('{"title": "one\u2028title", "id": "a"}\nb\u0085c\n', "utf-8")
    assert read_list(path) == ["a", "b\u0085c"]
    path.write_text('{"title": "x"}')
    with pytest.raises(
        TakedownError, match=r"list:1: has none of the keys id, locator, url"
    ):
        read_list(path)
    path.write_text("# nothing\n")
    with pytest.raises(TakedownError, match="names no document"):
        read_list(path)
