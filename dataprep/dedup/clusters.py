"""Survivors of clusters of duplicates.

Clusters are connected components of the graph of links. Two rules choose their
survivors:

- `connected` (single linkage): only the best member of a cluster survives;
- `survivors`: the best member survives and its duplicates are dropped; the best
  remaining member survives, and so on (the first maximal independent set in the order
  of `keep`). Every dropped document is a duplicate of its survivor, and no two
  survivors are duplicates, except in clusters beyond MOST_COMPARISONS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.shuffle_format import group_starts, sort_rows, spread_groups
from gristmill.dataprep.where_sql import StepColumns
from gristmill.mixtures.schema.prepare import column_prefix

DOCUMENT_COLUMNS = ("id", "source", "locator")
REASON_COLUMNS = ("decided_by", "survivor_value", "member_value")
LENGTH = "length"
"""Code points of the text."""


@dataclass(frozen=True)
class KeepKey:
    """Sort key for the choice of survivors: a column, smallest value first, or largest
    if `descending`.
    """

    column: str
    descending: bool = False

    def __str__(self) -> str:
        return f"{self.column} desc" if self.descending else self.column


def parse_keep(keys: Sequence[str]) -> list[KeepKey]:
    """Parse keys such as `["length desc", "source"]` and append the document id, which
    breaks all ties.

    Raises:
        ValueError: a key is not a column name with an optional `desc`.
    """
    parsed = []
    for key in keys:
        column, *order = key.split()
        if order not in ([], ["desc"]):
            raise ValueError(
                f"keep: {key!r} is not a column name, optionally followed by `desc`"
            )
        parsed.append(KeepKey(column, bool(order)))
    if all(key.column != "id" for key in parsed):
        parsed.append(KeepKey("id"))
    return parsed


def qualified(measured: Mapping[str, Collection[str]]) -> StepColumns:
    """Map every valid column name to its (step, column).

    If several steps write the same column, the plain name is the last step's and
    `<step>_<column>` names each.

    Args:
        measured: name of a step -> its columns, in the order of the steps.
    """
    uses = Counter(column for columns in measured.values() for column in columns)
    plain: StepColumns = {}
    prefixed: StepColumns = {}
    for step, columns in measured.items():
        for column in columns:
            plain[column] = (step, column)
            if uses[column] > 1:
                prefixed[f"{column_prefix(step)}_{column}"] = (step, column)
    return plain | prefixed


def check_names(keys: Sequence[KeepKey], measured: Iterable[str]) -> None:
    """Raise ValueError if a key is not a column.

    Args:
        measured: the columns of the earlier stages.
    """
    available = [LENGTH, *DOCUMENT_COLUMNS, *measured]
    for key in keys:
        if key.column not in available:
            raise ValueError(
                f"keep: there is no column {key.column!r}; available at this place of "
                f"`prepare` are {', '.join(available)}"
            )


MOST_COMPARISONS = 10_000_000
"""Limit of comparisons per cluster with `survivors` that find no duplicate: half a
minute of a core, and enough for 4,472 texts without duplicates. Remaining members are
kept, except copies of equal texts, and counted.
"""

AreAlike = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function (rows of members, row of a survivor for each) -> bool: the two are
duplicates.
"""


def survivors_of_components(members: pa.Table, keys: Sequence[KeepKey]) -> np.ndarray:
    """Apply the rule `connected`: the best row (int64) of each row's cluster; arguments
    as of `explain_choices`.
    """
    component = members["component"].to_numpy()
    sizes = np.bincount(component)
    return best_first(members, keys)[np.cumsum(sizes) - sizes][component]


def survivors_alike(
    component: np.ndarray,
    texts: np.ndarray,
    order: np.ndarray,
    are_alike: AreAlike,
    most: int = MOST_COMPARISONS,
) -> tuple[np.ndarray, int]:
    """Apply the rule `survivors`: for each of n rows the row of its survivor, itself if
    it is kept.

    Each round takes the best remaining row of every cluster as a survivor and drops its
    duplicates.

    Args:
        component, texts: int64 of shape (n,), the cluster and the text of each row, as
            numbers.
        order: the rows by cluster, in each the best first, as from `best_first`.
        are_alike: the comparison.
        most: limit of comparisons per cluster that find no duplicate.

    Returns:
        int64 of shape (n,); and the number of rows kept without comparison with every
        other kept row.
    """
    survivor = np.arange(len(order))
    open_rows = order
    uncompared = 0
    spent = np.zeros(int(component.max(initial=-1)) + 1, np.int64)
    while len(open_rows):
        starts = group_starts(component[open_rows])
        best = np.delete(
            open_rows[starts][spread_groups(starts, len(open_rows))], starts
        )
        candidates = np.delete(open_rows, starts)
        is_duplicate = are_alike(candidates, best)
        survivor[candidates[is_duplicate]] = best[is_duplicate]
        open_rows = candidates[~is_duplicate]
        np.add.at(spent, component[open_rows], 1)
        exhausted = spent[component[open_rows]] >= most
        rows = open_rows[exhausted]
        rows = rows[sort_rows(component[rows], texts[rows])]
        starts = group_starts(component[rows], texts[rows])
        survivor[rows] = rows[starts][spread_groups(starts, len(rows))]
        uncompared += len(starts)
        open_rows = open_rows[~exhausted]
    return survivor, uncompared


def best_first(members: pa.Table, keys: Sequence[KeepKey]) -> np.ndarray:
    """Row numbers (int64) sorted by cluster, the best of each first; null and NaN come
    last in either direction.
    """
    keys = [KeepKey("component"), *keys]
    columns = pa.table(
        {str(place): members[key.column] for place, key in enumerate(keys)}
    )
    directions = [
        (str(place), "descending" if key.descending else "ascending")
        for place, key in enumerate(keys)
    ]
    return pc.sort_indices(columns, sort_keys=directions).to_numpy().astype(np.int64)


def explain_choices(
    members: pa.Table, keys: Sequence[KeepKey], survivor: np.ndarray
) -> pa.Table:
    """Cluster of each row, number of documents that its survivor represents, and the
    reason for that choice.

    A member loses by the first key in which it differs from its survivor. The result
    depends only on the members' values, not on the order of the rows.

    Args:
        members: `component` (int, without gaps), `id` (16 bytes) and a column for each
            key; one row per document.
        keys: as from `parse_keep`.
        survivor: int64, the row of each row's survivor.

    Returns:
        one row per member: `cluster` (the smallest id in it), `size` (documents with
        the same survivor), `survivor` (int64), `decided_by`, `survivor_value`,
        `member_value` (strings; null for the survivor itself).
    """
    sizes = np.bincount(survivor, minlength=len(survivor))
    smallest = survivors_of_components(members, [KeepKey("id")])
    reasons = {name: np.full(len(members), None, object) for name in REASON_COLUMNS}
    open_rows = np.flatnonzero(survivor != np.arange(len(members)))
    for key in keys:
        winners = members[key.column].take(survivor[open_rows]).combine_chunks()
        losers = members[key.column].take(open_rows).combine_chunks()
        # Null equals null, and NaN equals NaN.
        both_null = pc.and_(winners.is_null(), losers.is_null())
        same = pc.or_(pc.fill_null(pc.equal(winners, losers), False), both_null)
        if pa.types.is_floating(winners.type):
            both_nan = pc.and_(pc.is_nan(winners), pc.is_nan(losers))
            same = pc.or_(same, pc.fill_null(both_nan, False))
        differ = ~same.to_numpy(zero_copy_only=False)
        rows = open_rows[differ]
        reasons["decided_by"][rows] = str(key)
        for name, values in (("survivor_value", winners), ("member_value", losers)):
            reasons[name][rows] = [
                value.hex() if isinstance(value, bytes) else str(value)
                for value in values.filter(differ).to_pylist()
            ]
        open_rows = open_rows[~differ]
    return pa.table(
        {
            "cluster": members["id"].take(smallest),
            "size": pa.array(sizes[survivor], pa.int32()),
            "survivor": pa.array(survivor, pa.int64()),
            **{name: pa.array(values, pa.string()) for name, values in reasons.items()},
        }
    )
