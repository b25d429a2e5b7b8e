"""From a cluster to the documents of it that survive.

Clusters are connected components: what is joined by links, directly or through others. Two rules choose who goes:

- `connected` (single linkage): the best of a cluster survives, whatever the others are like;
- `survivors`: the best survives, and what is alike enough to it goes; of what is left the best survives, and so on (the
  first maximal independent set in the order of `keep`). So every document that goes is alike enough to the one that is
  kept for it, and no two that are kept are alike, but for clusters beyond MOST_COMPARISONS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.mixtures.prepare import column_prefix

DOCUMENT_COLUMNS = ("id", "source", "locator")
LENGTH = "length"
"""Code points of the text."""


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
            raise ValueError(f"keep: {key!r} is not a column name, optionally followed by `desc`")
        parsed.append(KeepKey(column, bool(order)))
    return parsed if any(key.column == "id" for key in parsed) else [*parsed, KeepKey("id")]


def qualified(measured: Mapping[str, Collection[str]]) -> dict[str, tuple[str, str]]:
    """Name -> (step, column), of all that may be named: of two equal columns the plain name is the later step's, and
    `<step>_<column>` each one's own.

    Args:
        measured: name of a step -> its columns, in the order of the steps.
    """
    uses = Counter(column for columns in measured.values() for column in columns)
    own = {
        f"{column_prefix(step)}_{column}": (step, column)
        for step, columns in measured.items()
        for column in columns
        if uses[column] > 1
    }
    return {**{column: (step, column) for step, columns in measured.items() for column in columns}, **own}


def check_names(keys: Sequence[KeepKey], measured: Iterable[str]) -> None:
    """Raise ValueError where a key names no column.

    Args:
        measured: the columns of the stages before.
    """
    available = [LENGTH, *DOCUMENT_COLUMNS, *measured]
    for key in keys:
        if key.column not in available:
            raise ValueError(
                f"keep: there is no column {key.column!r}; available at this place of `prepare` are "
                f"{', '.join(available)}"
            )


MOST_COMPARISONS = 10_000_000
"""With `survivors`, so many comparisons of texts that are not alike are made in one cluster: half a minute of a core,
and enough for 4,472 texts of which no two are alike. What is left then is kept, but for equal texts, and counted."""

AreAlike = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Rows of members, and for each the row of a survivor -> bool, whether they are duplicates of each other."""


def survivors_of_components(members: pa.Table, keys: Sequence[KeepKey]) -> np.ndarray:
    """The rule `connected`: for each row (int64) the best row of its cluster; arguments as of `explain_choices`."""
    best = best_first(members, keys)[_starts(members)]
    survivors: np.ndarray = best[members["component"].to_numpy()]
    return survivors


def survivors_alike(
    component: np.ndarray, texts: np.ndarray, order: np.ndarray, are_alike: AreAlike, most: int = MOST_COMPARISONS
) -> tuple[np.ndarray, int]:
    """The rule `survivors`: for each of n rows the row that is kept in its place, itself where it is kept.

    In rounds over all clusters at once: the best row left of each survives, and takes with it what is alike.

    Args:
        component, texts: int64 of shape (n,), the cluster and the text of each row, as numbers.
        order: the rows by cluster, in each the best first, as from `best_first`.
        are_alike: what decides.
        most: comparisons of what is not alike, in one cluster.

    Returns:
        int64 of shape (n,); and how many rows were kept without having been compared with all others that are.
    """
    survivor, left, uncompared = np.arange(len(order)), order, 0
    spent = np.zeros(int(component.max(initial=-1)) + 1, np.int64)
    while len(left):
        first = np.ones(len(left), bool)
        first[1:] = component[left[1:]] != component[left[:-1]]
        rest, best = left[~first], left[first][np.cumsum(first) - 1][~first]
        alike = are_alike(rest, best)
        survivor[rest[alike]] = best[alike]
        left = rest[~alike]
        np.add.at(spent, component[left], 1)
        over = spent[component[left]] >= most
        survivor[left[over]] = _first_of_text(left[over], component, texts)
        uncompared += int((survivor[left[over]] == left[over]).sum())
        left = left[~over]
    return survivor, uncompared


def _first_of_text(rows: np.ndarray, component: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """For each of some rows the first one among them of the same cluster and text."""
    by_text = np.lexsort((np.arange(len(rows)), texts[rows], component[rows]))
    new = np.ones(len(rows), bool)
    new[1:] = (np.diff(component[rows[by_text]]) != 0) | (np.diff(texts[rows[by_text]]) != 0)
    found = np.empty(len(rows), np.int64)
    found[by_text] = rows[by_text[new][np.cumsum(new) - 1]]
    return found


def best_first(members: pa.Table, keys: Sequence[KeepKey]) -> np.ndarray:
    """Row numbers (int64) by cluster, in each the best first; null and NaN come last in either direction."""
    return _order(members, [KeepKey("component"), *keys])


def explain_choices(members: pa.Table, keys: Sequence[KeepKey], survivor: np.ndarray) -> pa.Table:
    """Which cluster each row is in, for how many its survivor stands, and why that was chosen.

    The first key in which a member differs from the survivor decided against it. The result depends on the members'
    values alone, not on the order of the rows.

    Args:
        members: `component` (int, without gaps), `id` (16 bytes) and a column for each key; one row per document.
        keys: as from `parse_keep`.
        survivor: int64, the row of each one's survivor.

    Returns:
        row for row: `cluster` (the smallest id in it), `size` (documents with the same survivor), `survivor` (int64),
        `decided_by`, `survivor_value`, `member_value` (strings; null for the survivor itself).
    """
    by_id = _order(members, [KeepKey("component"), KeepKey("id")])
    decided_by, survivor_value, member_value = _reasons(members, survivor, keys)
    return pa.table(
        {
            "cluster": members["id"].take(pa.array(by_id[_starts(members)][members["component"].to_numpy()])),
            "size": pa.array(np.bincount(survivor, minlength=len(survivor))[survivor], pa.int32()),
            "survivor": pa.array(survivor, pa.int64()),
            "decided_by": pa.array(decided_by, pa.string()),
            "survivor_value": pa.array(survivor_value, pa.string()),
            "member_value": pa.array(member_value, pa.string()),
        }
    )


def _starts(members: pa.Table) -> np.ndarray:
    """Where each cluster begins among the rows sorted by cluster."""
    sizes = np.bincount(members["component"].to_numpy())
    starts: np.ndarray = np.cumsum(sizes) - sizes
    return starts


def _order(members: pa.Table, keys: Sequence[KeepKey]) -> np.ndarray:
    """Row numbers in the order of the keys."""
    columns = pa.table([members[key.column] for key in keys], names=[str(place) for place in range(len(keys))])
    directions = [(str(place), "descending" if key.descending else "ascending") for place, key in enumerate(keys)]
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
