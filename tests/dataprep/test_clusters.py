"""Buckets, pairs, components and survivors, as functions of arrays."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill.dataprep.dedup.candidate_pairs import (
    LARGEST_BUCKET,
    candidate_pairs,
    cut_runs,
    pair_runs,
)
from gristmill.dataprep.dedup.clusters import (
    KeepKey,
    best_first,
    explain_choices,
    parse_keep,
    survivors_alike,
    survivors_of_components,
)
from gristmill.dataprep.dedup.components import (
    distinct_pairs,
    forest,
    pairs_table,
)
from gristmill.dataprep.runners.shuffle import Shuffled
from gristmill.dataprep.shuffle_format import by_partition, write_batches

numbers = st.integers(0, 12)


def pair_up(
    rows: list[tuple[int, int, int]], num_new: int = 10**9
) -> set[tuple[int, int]]:
    columns = np.array(rows, np.int64).reshape(-1, 3)
    keys, documents, texts = (
        columns[:, 0].astype(np.uint64),
        columns[:, 1],
        columns[:, 2].astype(np.uint64),
    )
    candidates = candidate_pairs(keys, documents, texts, documents, num_new)
    pairs = [(int(a), int(b)) for a, b in candidates]
    assert pairs == sorted(set(pairs))
    return set(pairs)


@given(
    st.lists(st.tuples(numbers, numbers), max_size=40),
    st.randoms(use_true_random=False),
)
def test_small_buckets_pair_all_texts_and_join_copies(
    entries: list[tuple[int, int]], shuffle: random.Random
) -> None:
    # two documents share a text
    rows = [(key, document, document // 2) for key, document in set(entries)]
    pairs = pair_up(rows)
    shuffle.shuffle(rows)
    assert pair_up(rows) == pairs
    expected = set()
    for key in {key for key, _, _ in rows}:
        texts: dict[int, list[int]] = {}
        for _, document, text in sorted(row for row in rows if row[0] == key):
            texts.setdefault(text, []).append(document)
        expected |= {
            (min(a[0], b[0]), max(a[0], b[0]))
            for a, b in combinations(texts.values(), 2)
        }
        expected |= {
            (copies[0], copy) for copies in texts.values() for copy in copies[1:]
        }
    assert pairs == expected


@pytest.mark.parametrize("size", [LARGEST_BUCKET, LARGEST_BUCKET + 1, 5000])
def test_a_bucket_never_costs_the_square_of_its_size(size: int) -> None:
    texts = random.Random(size).sample(range(10**6), size)
    pairs = pair_up([(7, document, text) for document, text in enumerate(texts)])
    if size <= LARGEST_BUCKET:
        assert len(pairs) == size * (size - 1) // 2
        return
    assert len(pairs) == 2 * (size - 1) - 1
    assert forest(np.array(sorted(pairs))).tolist() == [
        [document, 0] for document in range(1, size)
    ]


def test_copies_of_one_text_count_once_towards_bucket_size() -> None:
    assert len(pair_up([(7, document, 1) for document in range(1000)])) == 999


@given(st.lists(st.tuples(numbers, numbers), max_size=40), st.integers(0, 12))
def test_older_documents_are_paired_only_with_new_ones(
    entries: list[tuple[int, int]], num_new: int
) -> None:
    rows = [(key, document, document) for key, document in set(entries)]
    pairs, every_pair = pair_up(rows, num_new), pair_up(rows)
    assert pairs == {(first, second) for first, second in every_pair if first < num_new}


def test_each_new_copy_is_paired_with_the_older_document() -> None:
    assert pair_up([(7, document, 1) for document in range(4)], 3) == {
        (0, 3),
        (1, 3),
        (2, 3),
    }


def test_large_bucket_pairs_every_new_text_with_an_older_one() -> None:
    texts = random.Random(2).sample(range(10**6), 100)
    pairs = pair_up([(7, document, text) for document, text in enumerate(texts)], 97)
    first_old = min(range(97, 100), key=lambda document: texts[document])
    assert {new for new, old in pairs if old == first_old} == set(range(97))


def test_pairs_are_ordered_and_distinct() -> None:
    assert distinct_pairs(np.array([[3, 1], [1, 3], [3, 1], [0, 9]])).tolist() == [
        [0, 9],
        [1, 3],
        [3, 1],
    ]


@given(st.lists(st.integers(0, 12), max_size=30), st.integers(1, 20))
def test_runs_cover_all_items_and_cost_less_than_twice_the_limit(
    costs: list[int], most: int
) -> None:
    runs = list(cut_runs(np.array(costs, np.int64), most))
    assert [at for begin, end in runs for at in range(begin, end)] == list(
        range(len(costs))
    )
    assert all(
        sum(costs[begin:end]) < 2 * most or end - begin == 1 for begin, end in runs
    )


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.tuples(st.integers(10, 999), numbers), max_size=20), max_size=3
    ),
    st.integers(0, 9),
)
def test_pairs_are_read_in_runs_of_whole_documents(
    tmp_path: Path, files: list[list[tuple[int, int]]], hub: int
) -> None:
    files = [
        sorted({*file, *((500, 100 + at) for at in range(3 * hub))}) for file in files
    ]
    names = [f"{number}.arrow" for number in range(len(files))]
    for name, file in zip(names, files, strict=True):
        pairs = np.array(file, np.int64).reshape(-1, 2)
        write_batches(
            tmp_path / name,
            *by_partition(pairs_table(pairs), (pairs[:, 0] >= 10).astype(np.int64), 2),
        )
    runs = [
        run.tolist() for run in pair_runs(Shuffled(tmp_path, 2, names), 1, 10, 1000, 4)
    ]
    assert [tuple(pair) for run in runs for pair in run] == sorted(
        {pair for file in files for pair in file}
    )
    assert all(
        len(run) < 8 * max(len(files), 1) or len({left for left, _ in run}) == 1
        for run in runs
    )
    assert len({left for run in runs for left in {left for left, _ in run}}) == sum(
        len({left for left, _ in run}) for run in runs
    )


@given(
    st.lists(st.tuples(numbers, numbers), max_size=40),
    st.permutations(range(13)),
    st.integers(0, 12),
)
def test_pairs_do_not_depend_on_document_numbers(
    entries: list[tuple[int, int]], renumbered: list[int], num_new: int
) -> None:
    rows = np.array(
        [(key, document) for key, document in set(entries)], np.int64
    ).reshape(-1, 2)
    keys, documents, texts = (
        rows[:, 0].astype(np.uint64),
        rows[:, 1],
        (rows[:, 1] // 3).astype(np.uint64),
    )
    # New documents have numbers below those of old ones.
    shuffled = np.argsort(
        np.argsort([(0 if at < num_new else 100) + renumbered[at] for at in range(13)])
    )
    before = candidate_pairs(keys, documents, texts, documents, num_new)
    after = candidate_pairs(keys, shuffled[documents], texts, documents, num_new)
    assert {tuple(pair) for pair in shuffled[before].tolist()} == {
        tuple(pair) for pair in after.tolist()
    }


def members(rows: list[dict[str, Any]]) -> pa.Table:
    types = {
        "component": pa.int32(),
        "id": pa.binary(16),
        "score": pa.float64(),
        "name": pa.string(),
    }
    with_bytes = [{**row, "id": row["id"].to_bytes(16, "little")} for row in rows]
    return pa.Table.from_pylist(with_bytes, schema=pa.schema(types))


def number_components(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same clusters, numbered without gaps, as `connect` numbers them."""
    used = sorted({row["component"] for row in rows})
    return [{**row, "component": used.index(row["component"])} for row in rows]


def choose(rows: list[dict[str, Any]], keys: list[KeepKey]) -> list[dict[str, Any]]:
    table = members(rows)
    chosen: list[dict[str, Any]] = explain_choices(
        table, keys, survivors_of_components(table, keys)
    ).to_pylist()
    return chosen


member_rows = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(0, 2**128 - 1),
            "score": st.one_of(
                st.none(), st.sampled_from([0.5, 1.0, float("nan"), -3.0])
            ),
            "name": st.one_of(st.none(), st.sampled_from(["a", "b", "é"])),
            "component": st.integers(0, 2),
        }
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda row: row["id"],
).map(number_components)


@given(
    member_rows,
    st.permutations([KeepKey("score", True), KeepKey("name")]),
    st.randoms(use_true_random=False),
)
def test_survivor_is_the_minimum_by_keys_in_any_order(
    rows: list[dict[str, Any]], keys: list[KeepKey], shuffle: random.Random
) -> None:
    keys = [*keys, KeepKey("id")]

    def rank(row: dict[str, Any]) -> list[Any]:
        ranks: list[Any] = []
        for key in keys:
            value = row[key.column]
            missing = 2 if value is None else int(value != value)
            if key.column == "id":
                value = value.to_bytes(16, "little")
            ranks.append(
                (missing, 0 if missing else -value if key.descending else value)
            )
        return ranks

    chosen = choose(rows, keys)
    for row, choice in zip(rows, chosen):
        cluster = [member for member in rows if member["component"] == row["component"]]
        assert rows[choice["survivor"]] is min(cluster, key=rank)
        assert choice["cluster"] == min(
            member["id"].to_bytes(16, "little") for member in cluster
        )
        assert choice["size"] == len(cluster)
        assert (choice["decided_by"] is None) == (rows[choice["survivor"]] is row)
    shuffled = shuffle.sample(rows, len(rows))
    again = choose(shuffled, keys)
    for row, choice in zip(shuffled, again):
        before = chosen[
            next(at for at, member in enumerate(rows) if member["id"] == row["id"])
        ]
        assert shuffled[choice["survivor"]]["id"] == rows[before["survivor"]]["id"]
        assert {**choice, "survivor": 0} == {**before, "survivor": 0}


def test_choice_is_explained_by_the_first_key_that_differs() -> None:
    rows = [
        {"component": 0, "id": 1, "score": 1.0, "name": "b"},
        {"component": 0, "id": 2, "score": 1.0, "name": "a"},
        {"component": 0, "id": 3, "score": None, "name": "a"},
        {"component": 0, "id": 4, "score": 1.0, "name": "a"},
    ]
    chosen = choose(rows, parse_keep(["score desc", "name"]))
    assert [row["survivor"] for row in chosen] == [1, 1, 1, 1]
    reasons = [
        (row["decided_by"], row["survivor_value"], row["member_value"])
        for row in chosen
    ]
    as_hex = [number.to_bytes(16, "little").hex() for number in (2, 4)]
    assert reasons == [
        ("name", "a", "b"),
        (None, None, None),
        ("score desc", "1.0", "None"),
        ("id", *as_hex),
    ]


def test_id_is_the_implicit_last_key() -> None:
    assert [str(key) for key in parse_keep(["length desc", "source"])] == [
        "length desc",
        "source",
        "id",
    ]
    assert [str(key) for key in parse_keep(["id desc", "source"])] == [
        "id desc",
        "source",
    ]


def plain_survivors(
    rows: list[dict[str, Any]], keys: list[KeepKey], alike: Any
) -> list[int]:
    """The rule `survivors`, row by row."""
    kept: list[int] = []
    survivor = list(range(len(rows)))
    for row in best_first(members(rows), keys).tolist():
        same = [
            survivor_row
            for survivor_row in kept
            if rows[survivor_row]["component"] == rows[row]["component"]
            and alike(row, survivor_row)
        ]
        survivor[row] = same[0] if same else row
        kept += [] if same else [row]
    return survivor


@given(member_rows, st.floats(0.1, 0.9), st.randoms(use_true_random=False))
def test_survivors_rule_drops_exactly_the_documents_like_a_kept_one(
    rows: list[dict[str, Any]], share: float, shuffle: random.Random
) -> None:
    keys = parse_keep(["score desc", "name"])
    ids = sorted(row["id"] for row in rows)
    like = {
        (a, b): a // 2 == b // 2
        or random.Random(f"{min(a, b)} {max(a, b)}").random() < share
        for a in ids
        for b in ids
    }

    def run(rows: list[dict[str, Any]]) -> dict[int, int]:
        def alike(row: int, other: int) -> bool:
            return like[rows[row]["id"], rows[other]["id"]]

        table = members(rows)
        survivors, uncompared = survivors_alike(
            table["component"].to_numpy(),
            np.arange(len(rows)),
            best_first(table, keys),
            lambda left, right: np.array(
                [alike(*pair) for pair in zip(left, right, strict=True)], bool
            ),
        )
        assert survivors.tolist() == plain_survivors(rows, keys, alike)
        assert uncompared == 0
        kept = [row for row in range(len(rows)) if survivors[row] == row]
        assert not [
            pair
            for pair in combinations(kept, 2)
            if alike(*pair) and rows[pair[0]]["component"] == rows[pair[1]]["component"]
        ]
        assert all(
            alike(row, survivors[row])
            for row in range(len(rows))
            if survivors[row] != row
        )
        return {
            row["id"]: rows[survivors[place]]["id"] for place, row in enumerate(rows)
        }

    assert run(rows) == run(shuffle.sample(rows, len(rows)))


def test_oversized_cluster_drops_only_equal_texts_and_counts_the_uncompared() -> None:
    component, order = np.repeat([0, 1], [20, 3]), np.arange(23)
    texts = np.array([*range(15), 10, 11, 12, 13, 14, 0, 1, 2])
    compared: list[int] = []

    def equal_texts(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        compared.append(len(left))
        return texts[left] == texts[right]

    survivors, uncompared = survivors_alike(
        component, texts, order, equal_texts, most=50
    )
    assert survivors[:15].tolist() == list(range(15))
    assert survivors[15:20].tolist() == [10, 11, 12, 13, 14]
    assert survivors[20:].tolist() == [20, 21, 22]
    assert compared == [19 + 2, 18 + 1, 17]
    assert uncompared == 12
