"""From a cluster to the one document of it that survives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class KeepKey:
    """One key of the survivor's choice: a column, smallest value first, or largest where `descending`."""

    column: str
    descending: bool = False

    def __str__(self) -> str:
        return f"{self.column} desc" if self.descending else self.column


def parse_keep(keys: Sequence[str]) -> list[KeepKey]:
    """Read `["length desc", "source"]`; the document id is added as the last key, so that no choice is left open.

    Raises:
        ValueError: a key is not a column name with an optional `desc`.
    """
    parsed = []
    for key in keys:
        column, *order = key.split()
        if order not in ([], ["desc"]):
            raise ValueError(f"dedup.keep: {key!r} is not a column name, optionally followed by `desc`")
        parsed.append(KeepKey(column, bool(order)))
    return parsed if any(key.column == "id" for key in parsed) else [*parsed, KeepKey("id")]


def choose_survivors(members: pa.Table, keys: Sequence[KeepKey]) -> pa.Table:
    """Choose the survivor of each cluster, and say why.

    The first key in which a member differs from the survivor decided against it. Null and NaN come last in either
    direction. The result depends on the members' values alone, not on the order of the rows.

    Args:
        members: `component` (int), `id` (16 bytes) and a column for each key; one row per document.
        keys: as from `parse_keep`.

    Returns:
        row for row: `cluster` (the smallest id in it), `size`, `survivor` (int64, row number of the survivor),
        `decided_by`, `survivor_value`, `member_value` (strings; null for the survivor itself).
    """
    component = members["component"].to_numpy()
    order = _order(members, [KeepKey("component"), *keys])
    by_id = _order(members, [KeepKey("component"), KeepKey("id")])
    sizes = np.bincount(component)
    starts = np.cumsum(sizes) - sizes
    survivor = order[starts][component]
    decided_by, survivor_value, member_value = _reasons(members, survivor, keys)
    return pa.table(
        {
            "cluster": members["id"].take(pa.array(by_id[starts][component])),
            "size": pa.array(sizes[component], pa.int32()),
            "survivor": pa.array(survivor, pa.int64()),
            "decided_by": pa.array(decided_by, pa.string()),
            "survivor_value": pa.array(survivor_value, pa.string()),
            "member_value": pa.array(member_value, pa.string()),
        }
    )


def _order(members: pa.Table, keys: Sequence[KeepKey]) -> np.ndarray:
    """Row numbers in the order of the keys."""
    columns = pa.table([members[key.column] for key in keys], names=[str(place) for place in range(len(keys))])
    directions = [
        (str(place), "descending" if key.descending else "ascending") for place, key in enumerate(keys)
    ]
    order: np.ndarray = pc.sort_indices(columns, sort_keys=directions).to_numpy()
    return order.astype(np.int64)


def _reasons(
    members: pa.Table, survivor: np.ndarray, keys: Sequence[KeepKey]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row: the key that decided against it, the survivor's value and its own (objects: strings or None)."""
    decided_by, survivor_value, member_value = (np.full(len(members), None, object) for _ in range(3))
    open_rows = np.flatnonzero(survivor != np.arange(len(members)))
    for key in keys:
        winners = members[key.column].take(pa.array(survivor[open_rows])).combine_chunks()
        losers = members[key.column].take(pa.array(open_rows)).combine_chunks()
        differ = _differ(winners, losers)
        rows, decided = open_rows[differ], pa.array(differ)
        decided_by[rows] = str(key)
        survivor_value[rows] = [_as_text(value) for value in winners.filter(decided).to_pylist()]
        member_value[rows] = [_as_text(value) for value in losers.filter(decided).to_pylist()]
        open_rows = open_rows[~differ]
    return decided_by, survivor_value, member_value


def _differ(left: pa.Array, right: pa.Array) -> np.ndarray:
    """Where values differ (bool); null equals null, and NaN equals NaN."""
    same = pc.fill_null(pc.equal(left, right), False)
    same = pc.or_(same, pc.and_(left.is_null(), right.is_null()))
    if pa.types.is_floating(left.type):
        both = pc.and_(pc.is_nan(left), pc.is_nan(right))
        same = pc.or_(same, pc.fill_null(both, False))
    differ: np.ndarray = ~same.to_numpy(zero_copy_only=False)
    return differ


def _as_text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
