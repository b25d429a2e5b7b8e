"""Batches of tasks: every task is in one, the largest come first, and the last ones are small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.jobs.batches import deal
from gristmill.dataprep.jobs.engine import Task


def tasks_of(*sizes: int) -> list[Task]:
    return [Task(f"t{number:03d}", {"n": number}, size) for number, size in enumerate(sizes)]


def sizes_dealt(tasks: list[Task], workers: int) -> list[list[int]]:
    size = {task.name: task.size_bytes for task in tasks}
    return [[size[name] for name, _ in batch] for batch in deal(tasks, workers)]


def test_batches_of_equal_tasks_become_smaller_until_they_are_single_tasks() -> None:
    """Of 40 tasks two workers take a quarter of what is left: 10 of 40, 7 of 30, 5 of 23, ..., 1 of 7 and of fewer."""
    assert [len(batch) for batch in deal(tasks_of(*[5] * 40), 2)] == [10, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]


def test_a_task_larger_than_its_share_goes_first_and_alone() -> None:
    assert sizes_dealt(tasks_of(1, 1, 1, 1, 90, 1, 1, 1, 1, 2), 2) == [[90], [2], [1, 1], [1], [1], [1], [1], [1], [1]]


def test_tasks_of_unknown_size_are_dealt_one_by_one_and_by_name() -> None:
    assert [names for ((names, _),) in deal(tasks_of(0, 0, 0)[::-1], 2)] == ["t000", "t001", "t002"]


def test_with_as_many_workers_as_tasks_each_task_is_alone() -> None:
    tasks = tasks_of(7, 7, 7, 7, 7)
    assert [len(batch) for batch in deal(tasks, len(tasks))] == [1] * 5


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_every_task_is_in_one_batch_and_no_batch_exceeds_its_share(sizes: list[int], workers: int) -> None:
    tasks = tasks_of(*sizes)
    dealt = deal(tasks, workers)
    assert [element for batch in dealt for element in batch] == [
        (task.name, task.payload) for task in sorted(tasks, key=lambda task: (-task.size_bytes, task.name))
    ]
    left = sum(sizes)
    for batch in sizes_dealt(tasks, workers):
        assert len(batch) == 1 or sum(batch) <= left / (2 * workers)
        left -= sum(batch)
