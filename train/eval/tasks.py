"""Tasks of `evaluate` and `pretrain`, loaded where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gristmill.mixtures.schema.evaluation import Evaluate, Task
from gristmill.train.eval.task_files import TaskError
from gristmill.train.generation.language_model import LanguageModel
from gristmill.train.loop.objective import GroupedMetrics

if TYPE_CHECKING:
    from gristmill.train.eval.harness import HarnessTask, Results


def open_tasks(sections: Sequence[Task]) -> list[HarnessTask]:
    """Load tasks with their items; errors as for `harness.load_tasks`."""
    if not sections:
        return []
    from gristmill.train.eval.harness import load_tasks

    return load_tasks(sections)


def answer_tasks(
    language: LanguageModel, section: Evaluate, tasks: Sequence[HarnessTask]
) -> Results:
    """Results of a model by task and group."""
    results: Results = {}
    for task in tasks:
        results |= task.results(language, section.key_seed, section.bootstrap_samples)
    return results


@dataclass
class InLoopTasks:
    """Tasks evaluated during a training; called on every rank together.

    Attributes:
        sections: tasks, loaded once.
        language: the model in training.
        every: steps between evaluations; the last step is always included.
        last: the last step.

    Raises:
        TaskError: a task has the model write answers, or cannot be loaded.
    """

    sections: Sequence[Task]
    language: LanguageModel
    every: int
    last: int

    def __post_init__(self) -> None:
        self._tasks = open_tasks(self.sections)
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
        if not self._tasks or (step != self.last and step % self.every):
            return None
        values: GroupedMetrics = {}
        for task in self._tasks:
            for name, result in task.results(self.language, 0, 1).items():
                values[name] = {
                    metric: estimate["value"]
                    for metric, estimate in result.metrics.items()
                }
        return {"tasks": values}
