"""Connected components as stars equal scipy's, from one task or from several that each
see a part.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from gristmill.dataprep.dedup import components
from gristmill.dataprep.dedup.components import (
    count_star_partitions,
    count_unsettled,
    find_components,
    forest,
    join_summaries,
    labels_of,
    large_star,
    pairs_table,
    small_star,
    summarise,
)
from gristmill.dataprep.dedup.dedup_index import DedupPlan
from gristmill.dataprep.document_numbers import Numbering
from gristmill.dataprep.shuffle_format import by_partition, task_file, write_batches
from gristmill.mixtures.steps.dedup import Dedup

numbers = st.integers(0, 30)
graphs = st.lists(
    st.tuples(numbers, numbers).filter(lambda pair: pair[0] != pair[1]), max_size=40
).map(lambda pairs: np.array(pairs, np.int64).reshape(-1, 2))


def smallest_of(pairs: np.ndarray) -> dict[int, int]:
    """Map of each node to the smallest node of its component, by scipy."""
    size = int(pairs.max(initial=-1)) + 1
    graph = coo_array((np.ones(len(pairs)), tuple(pairs.T)), shape=(size, size))
    component = (
        connected_components(graph, directed=False)[1]
        if size
        else np.empty(0, np.int64)
    )
    return {
        int(node): int(np.flatnonzero(component == component[node])[0])
        for node in np.unique(pairs)
    }


def as_stars(labels: dict[int, int]) -> set[tuple[int, int]]:
    return {(node, root) for node, root in labels.items() if node != root}


def edges(pairs: np.ndarray) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in pairs}


def large_stars(pairs: np.ndarray) -> tuple[np.ndarray, int]:
    """One large-star step over all nodes, with the edges in two parts."""
    directed = np.concatenate([pairs, pairs[:, ::-1]])
    nodes = join_summaries(
        np.concatenate([summarise(directed[::2]), summarise(directed[1::2])])
    )
    return np.concatenate(
        [large_star(directed[::2], nodes), large_star(directed[1::2], nodes)]
    ), count_unsettled(nodes)


def small_stars(pairs: np.ndarray) -> np.ndarray:
    nodes = summarise(pairs)
    return np.concatenate(
        [small_star(pairs[::2], nodes), small_star(pairs[1::2], nodes)]
    )


@settings(deadline=None)
@given(graphs)
def test_forest_links_each_node_to_the_smallest_of_its_component(
    pairs: np.ndarray,
) -> None:
    links = forest(pairs)
    assert edges(links) == as_stars(smallest_of(pairs))
    assert len(links) == len(edges(links))


@settings(deadline=None)
@given(graphs)
def test_alternating_star_steps_converge_to_the_components(pairs: np.ndarray) -> None:
    expected, current = as_stars(smallest_of(pairs)), pairs
    for _ in range(12):
        current, unsettled = large_stars(current)
        if not unsettled:
            assert edges(current) == expected
            return
        current = small_stars(current)
        assert smallest_of(current) == smallest_of(pairs)
    raise AssertionError("no end after 12 rounds")


def test_chain_converges_in_logarithmically_many_rounds() -> None:
    chain = np.random.default_rng(3).permutation(1024)
    current, rounds = np.stack([chain[:-1], chain[1:]], axis=1), 0
    while (step := large_stars(current))[1]:
        current, rounds = small_stars(step[0]), rounds + 1
        assert len(edges(current)) < 1024
    assert edges(step[0]) == {(node, 0) for node in range(1, 1024)}
    assert rounds <= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "links_per_run"), [(1, 2), (3, 2), (3, 10**6), (8, 10)]
)
def test_labels_do_not_depend_on_partitions_or_run_length(
    num_partitions: int,
    links_per_run: int,
    make_context: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(components, "LINKS_PER_RUN", links_per_run)
    rng = np.random.default_rng(5)
    pairs = np.concatenate(
        [
            np.stack([np.arange(20, 60), np.arange(21, 61)], axis=1),  # a chain
            # a star around a large number
            np.stack([np.full(20, 99), np.arange(70, 90)], axis=1),
            rng.integers(100, 200, (60, 2)),
        ]
    )
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    context = make_context("work")
    starts = np.array([0, 50, 120, 200])
    plan = DedupPlan(
        {},
        {},
        Dedup(),
        [],
        Numbering(["a", "b", "c"], starts, 3),
        4,
        context.work,
        tmp_path / "out",
    )
    for task, part in zip(
        plan.partitions(), np.array_split(rng.permutation(pairs), 4), strict=True
    ):
        write_batches(
            task_file(plan.work, "links", task.name),
            *by_partition(pairs_table(part), np.zeros(len(part), np.int64), 1),
        )
    links = [task.name for task in plan.partitions()]
    labels_by_shard, number = find_components(plan, links, num_partitions, context)
    assert number >= len(smallest_of(pairs))
    per_shard = [labels_of(labels_by_shard, shard) for shard in range(3)]
    for shard, labels in enumerate(per_shard):
        assert (
            (labels[:, 0] >= starts[shard]) & (labels[:, 0] < starts[shard + 1])
        ).all()
    assert {int(a): int(b) for a, b in np.concatenate(per_shard)} == smallest_of(pairs)


def test_partitions_follow_from_the_number_of_links() -> None:
    assert [count_star_partitions(links) for links in (0, 1, 2_000_000, 2_000_001)] == [
        1,
        1,
        1,
        2,
    ]
