"""From pairs to clusters, and from a cluster to the one document of it that survives."""

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


def connect(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Connected components of an undirected graph.

    Args:
        pairs: int64 of shape (m, 2).

    Returns:
        nodes: int64, ascending, all that occur; component: int32, one number per node.
    """
    if not len(pairs):
        return np.empty(0, np.int64), np.empty(0, np.int32)
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    nodes, position = np.unique(pairs, return_inverse=True)
    left, right = position.reshape(-1, 2).T
    graph = coo_array((np.ones(len(left), bool), (left, right)), shape=(len(nodes), len(nodes)))
    _, component = connected_components(graph, directed=False)
    return nodes, component


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
) -> tuple[list[str | None], list[str | None], list[str | None]]:
    """Per row: the key that decided against it, the survivor's value and its own."""
    rows = len(members)
    decided_by: list[str | None] = [None] * rows
    values: tuple[list[str | None], list[str | None]] = ([None] * rows, [None] * rows)
    for key in keys:
        own = members[key.column].to_pylist()
        for row in range(rows):
            if decided_by[row] is not None or row == survivor[row]:
                continue
            winner, loser = own[survivor[row]], own[row]
            if winner == loser or (winner != winner and loser != loser):
                continue
            decided_by[row] = str(key)
            values[0][row], values[1][row] = _as_text(winner), _as_text(loser)
    return decided_by, *values


def _as_text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
