"""Tasks of `evaluate` and `pretrain`, loaded where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.mixtures.schema.evaluation import Evaluate, Task
from gristmill.train.eval.task_files import TaskError
from gristmill.train.generation.language_model import LanguageModel
from gristmill.train.loop.objective import GroupedMetrics

if TYPE_CHECKING:
    from gristmill.train.eval.harness import HarnessTask, Result


def open_tasks(sections: Sequence[Task]) -> list[HarnessTask]:
    """Load tasks with their items; errors as for `harness.load_tasks`."""
    if not sections:
        return []
    from gristmill.train.eval.harness import load_tasks

    return load_tasks(sections)


def answer_tasks(
    language: LanguageModel, section: Evaluate, tasks: Sequence[HarnessTask]
) -> dict[str, Result]:
    """Results of a model by task and group."""
    results: dict[str, Result] = {}
    for task in tasks:
        results |= task.results(language, section.key_seed, section.bootstrap_samples)
    return results


class InLoopTasks:
    """Tasks evaluated during a training; called on every rank together.

    Args:
        tasks: tasks, loaded once.
        language: the model in training.
        every: steps between evaluations; the last step is always included.
        last: the last step.

    Raises:
        TaskError: a task has the model write answers, or cannot be loaded.
    """

    def __init__(
        self, tasks: Sequence[Task], language: LanguageModel, every: int, last: int
    ) -> None:
        self._language = language
        self._every = every
        self._last = last
        self._tasks = open_tasks(tasks)
        for task in self._tasks:
            if any(
                loaded.OUTPUT_TYPE == "generate_until"
                for loaded in task.loaded["tasks"].values()
            ):
                raise TaskError(
                    f"task {task.section.name}: the model writes answers, which is not "
                    "measured during training; move it to `evaluate:`"
                )

    def __call__(self, step: int) -> dict[str, GroupedMetrics] | None:
        """`tasks`: task -> metric -> value; None at other steps and without tasks."""
        if not self._tasks or (step != self._last and step % self._every):
            return None
        values: GroupedMetrics = {}
        for task in self._tasks:
            for name, result in task.results(self._language, 0, 1).items():
                values[name] = {
                    metric: estimate["value"]
                    for metric, estimate in result.metrics.items()
                }
        return {"tasks": values}
