"""Look-ups read only the row groups that they need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.core.files import as_path
from gristmill.dataprep import row_groups
from gristmill.dataprep.documents import write_table
from gristmill.dataprep.row_groups import find_ids, read_matching, read_rows


@pytest.fixture(scope="module")
def sorted_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of 10,000 even numbers with their ids, in row groups of 100."""
    path = tmp_path_factory.mktemp("row-groups") / "numbers.parquet"
    numbers = np.arange(10_000) * 2
    ids = [int(number).to_bytes(16, "big") for number in numbers]
    write_table(
        path,
        pa.table({"number": numbers, "id": pa.array(ids, pa.binary(16))}),
        row_group_rows=100,
    )
    return path


@given(st.lists(st.integers(-3, 20_003), max_size=6))
def test_lookup_equals_a_full_read(sorted_file: Path, queries: list[int]) -> None:
    expected = sorted(
        {number for number in queries if number % 2 == 0 and 0 <= number < 20_000}
    )
    assert (
        read_matching(sorted_file, "number", queries)["number"].to_pylist() == expected
    )
    ids = [number.to_bytes(16, "big") for number in queries if number >= 0]
    assert read_matching(sorted_file, "id", ids, ["number"]).to_pydict() == {
        "number": expected
    }


def test_only_row_groups_that_may_hold_a_value_are_read(
    sorted_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []
    original = row_groups.pq.ParquetFile.read_row_groups

    def spy(
        self: object, groups: list[int], *arguments: object, **options: object
    ) -> pa.Table:
        read.append(groups)
        return original(self, groups, *arguments, **options)

    monkeypatch.setattr(row_groups.pq.ParquetFile, "read_row_groups", spy)
    read_matching(sorted_file, "number", [198, 200, 19_998])
    read_matching(sorted_file, "id", [(12_345).to_bytes(16, "big"), b"\xff" * 16])
    assert read == [[0, 1, 99], [61]]


@given(st.lists(st.integers(0, 9_999), max_size=8))
def test_rows_are_read_in_the_requested_order(
    sorted_file: Path, rows: list[int]
) -> None:
    assert read_rows(sorted_file, rows, ["number"])["number"].to_pylist() == [
        2 * row for row in rows
    ]


def test_unsorted_remote_files_are_read() -> None:
    path = as_path("memory://row-groups/mixed.parquet")
    write_table(
        path,
        pa.table({"number": [5, 1, 9, 1, 7], "name": list("abcde")}),
        row_group_rows=2,
    )
    assert read_matching(path, "number", [1, 7])["name"].to_pylist() == ["b", "d", "e"]


def test_documents_are_found_by_id_prefix_in_any_shard(tmp_path: Path) -> None:
    """Ids share digits up to the middle of a byte, in more shards than are read at
    once.
    """
    ids = [
        f"{number:08x}{'0' * 24}"
        for number in (0x12345678, 0x1234567F, 0x12345FFF, 0xABCDEF01, 0xABCDEF02)
    ]
    ids += [
        f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}".rjust(32, "f")
        for number in range(1, 60)
    ]
    shards = [f"part-{number:05d}.parquet" for number in range(20)]
    for number, shard in enumerate(shards):
        shard_ids = [bytes.fromhex(document) for document in ids[number::20]]
        table = pa.table(
            {"id": pa.array(shard_ids, pa.binary(16)), "text": ["t"] * len(shard_ids)}
        )
        write_table(tmp_path / shard, table, 2)
    places = {
        document: (shards[place % 20], place // 20)
        for place, document in enumerate(ids)
    }
    for prefix in (
        "1",
        "1234567",
        "12345",
        "abcdef0",
        "ABCDEF02",
        "f",
        "e",
        ids[63],
        ids[0][:31],
        ids[30],
    ):
        expected = sorted(
            places[document] for document in ids if document.startswith(prefix.lower())
        )
        assert find_ids(tmp_path, shards, prefix) == expected, prefix


def test_complete_id_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []
    original = row_groups._rows_between
    monkeypatch.setattr(
        row_groups,
        "_rows_between",
        lambda path, low, high: (searched.append(path.name), original(path, low, high))[
            1
        ],
    )
    shards = [f"part-{number:05d}.parquet" for number in range(40)]
    for number, shard in enumerate(shards):
        write_table(
            tmp_path / shard,
            pa.table({"id": pa.array([bytes([number] * 16)], pa.binary(16))}),
        )
    assert find_ids(tmp_path, shards, "03" * 16) == [(shards[3], 0)]
    assert sorted(searched) == shards[: row_groups.SEARCHING]
