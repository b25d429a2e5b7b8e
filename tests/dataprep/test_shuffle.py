"""Partitions are read from any number of files without mapping them all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.dataprep import shuffle


def mapped_files(folder: Path) -> int:
    with open("/proc/self/maps") as maps:
        return sum(str(folder) in line for line in maps)


@pytest.mark.parametrize("files", [1, 7, 8, 9, 40])
def test_never_more_files_are_mapped_than_a_process_may_have_and_the_rows_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    paths, expected = [tmp_path / f"{number}.arrow" for number in range(files)], []
    for number, path in enumerate(paths):
        rows = pa.table({"number": np.arange(20) + 100 * number, "text": [f"{number}-{row}" for row in range(20)]})
        shuffle.write_partitions(path, rows, np.arange(20) % 3, 3)
        expected += [100 * number + row for row in range(1, 20, 3)]
    seen: list[int] = []
    opened = shuffle.open_batches

    def watch(path: Path) -> Any:
        seen.append(mapped_files(tmp_path))
        return opened(path)

    monkeypatch.setattr(shuffle, "open_batches", watch)
    monkeypatch.setattr(shuffle, "MOST_MAPPED", 8)
    found = shuffle.read_partition(paths, 1)
    assert found["number"].to_pylist() == expected
    assert found["text"].to_pylist() == [f"{number // 100}-{number % 100}" for number in expected]
    assert max(seen) <= 8
    # A group of one file needs no copy.
    assert mapped_files(tmp_path) <= (files if files <= 8 else files % 8 == 1)
