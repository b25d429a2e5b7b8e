"""Boundaries of documents within rows, as the training loop reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.packed_files import (
    PADDING,
    Boundaries,
    boundaries_of,
    gather_boundaries,
    read_boundaries,
)

LENGTH = 10
rows_of_lengths = st.lists(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(
        lambda row: sum(row) <= LENGTH
    ),
    min_size=1,
    max_size=6,
)


def pieces_of(rows: list[list[int]], first: int) -> dict[str, np.ndarray]:
    """Build the columns of a table of pieces from the lengths of the pieces of each
    row.
    """
    flat = [
        (first + number, sum(row[:place]), length)
        for number, row in enumerate(rows)
        for place, length in enumerate(row)
    ]
    return dict(zip(("row", "start", "length"), np.array(flat).T, strict=True))


def slow_positions(row: list[int]) -> list[int]:
    positions = [position for length in row for position in range(length)]
    return positions + [PADDING] * (LENGTH - len(positions))


@given(rows_of_lengths, st.integers(0, 5))
def test_positions_restart_at_every_piece(rows: list[list[int]], first: int) -> None:
    boundaries = boundaries_of(pieces_of(rows, first), first, len(rows), LENGTH)
    assert boundaries.positions(LENGTH).tolist() == [
        slow_positions(row) for row in rows
    ]
    assert boundaries.filled().tolist() == [sum(row) for row in rows]


@given(rows_of_lengths, st.lists(st.integers(0, 5), max_size=8))
def test_boundaries_are_selected_in_any_order_and_joined(
    rows: list[list[int]], indices: list[int]
) -> None:
    selected = np.array([row % len(rows) for row in indices], dtype=np.int64)
    boundaries = boundaries_of(pieces_of(rows, 0), 0, len(rows), LENGTH)
    chosen = boundaries.of(selected)
    assert chosen.positions(LENGTH).tolist() == [
        slow_positions(rows[row]) for row in selected.tolist()
    ]
    shards = [lambda: boundaries] * 2
    ends = np.array([len(rows), 2 * len(rows)])
    joined = gather_boundaries(shards, ends, np.append(selected + len(rows), selected))
    assert joined.positions(LENGTH).tolist() == 2 * chosen.positions(LENGTH).tolist()


def test_row_without_pieces_counts_as_one_piece() -> None:
    boundaries = boundaries_of(pieces_of([[2, 3]], 1), 0, 3, LENGTH)
    assert boundaries.filled().tolist() == [10, 5, 10]
    assert boundaries.positions(LENGTH)[0].tolist() == list(range(10))
    no_pieces = {
        name: np.empty(0, dtype=np.int64) for name in ("row", "start", "length")
    }
    expected = Boundaries(np.array([0, 2, 4, 6]), np.array([0, LENGTH] * 3))
    boundaries = boundaries_of(no_pieces, 0, 3, LENGTH)
    assert np.array_equal(boundaries.offsets, expected.offsets)
    assert np.array_equal(boundaries.bounds, expected.bounds)


def test_boundaries_round_trip_and_a_truncated_file_is_rejected(tmp_path: Path) -> None:
    boundaries = boundaries_of(pieces_of([[2, 3], [10]], 0), 0, 2, LENGTH)
    path = tmp_path / "train-00000.cu"
    path.write_bytes(boundaries.to_bytes())
    assert path.stat().st_size == 8 * 3 + 4 * 5
    read = read_boundaries(path, 2)
    assert (read.offsets.tolist(), read.bounds.tolist()) == (
        [0, 3, 5],
        [0, 2, 5, 0, 10],
    )
    path.write_bytes(boundaries.to_bytes()[:-1])
    with pytest.raises(ValueError, match=r"43 bytes .* 2 rows"):
        read_boundaries(path, 2)


def test_boundaries_of_no_rows_are_empty() -> None:
    no_rows = np.empty(0, np.int64)
    boundaries = gather_boundaries([], no_rows, no_rows)
    assert len(boundaries) == 0
    assert boundaries.positions(LENGTH).shape == (0, LENGTH)
