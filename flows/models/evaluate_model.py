"""`gristmill evaluate MODEL --tasks FILE`: tasks and suites of a file for any model
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from gristmill.core.files import as_path
from gristmill.flows.pages.page_elements import Table, inline_text
from gristmill.flows.pages.terminal_tables import print_table, section
from gristmill.flows.report.evaluation import suite_parts, task_table
from gristmill.flows.report.stage_summaries import ModelMeasures, read_as
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.base import Section
from gristmill.mixtures.loader import anchor
from gristmill.mixtures.schema.evaluation import Evaluate, Suite, Task
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.mixtures.yaml_text import YamlFileError, problems_of, read_yaml


class EvaluationError(ValueError):
    """A model or a file of tasks cannot be used."""


class TaskFile(Section):
    """Content of a file of tasks: the keys `tasks` and `suites` of a manifest's
    `evaluate`.
    """

    tasks: tuple[Task, ...] = ()
    """The tasks."""
    suites: tuple[Suite, ...] = ()
    """Suites, each with all its tasks."""

    @model_validator(mode="after")
    def _asks_something(self) -> TaskFile:
        if not self.tasks and not self.suites:
            raise ValueError("it asks nothing; give `tasks: [...]` or `suites: [...]`")
        return self


def read_task_file(path: Path) -> TaskFile:
    """Read a YAML file of `tasks: [...]` and `suites: [...]`; relative paths in it start
    from its folder.

    Raises:
        EvaluationError: the file is invalid; the message has all problems.
    """
    try:
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise EvaluationError(
                f"{path}: a file of tasks is a mapping `tasks: [...]`; see "
                "evaluate.tasks in: gristmill schema --markdown DIR"
            )
        task_file = TaskFile.model_validate(content)
    except YamlFileError as error:
        raise EvaluationError(str(error)) from error
    except ValidationError as error:
        raise EvaluationError(f"{path}: {problems_of(error)}") from error
    try:
        anchored: TaskFile = anchor(task_file, path.resolve().parent)
        return anchored
    except OwnCodeError as error:
        raise EvaluationError(f"{path}: {error}") from error


def evaluate_folder(
    model: str, tokenizer: str | None, section: Evaluate
) -> dict[str, Any]:
    """Evaluate a model on tasks and suites. Answers of the model are not stored.

    Args:
        model: a folder with config.json and model.safetensors, exported or of a
            training stage.
        tokenizer: a folder with tokenizer.json; the model's own if absent.
        section: `tasks`, `suites`, and `seed` of the intervals.

    Returns:
        task or suite -> its summary.

    Raises:
        EvaluationError: the model, its tokenizer, or the data of a task or suite cannot
            be read.
    """
    import torch

    from gristmill.train.distributed.process_groups import make_deterministic
    from gristmill.train.eval.answering import answer_tasks, open_reader
    from gristmill.train.eval.suites import answer_suite, read_suite
    from gristmill.train.eval.tasks import read_task
    from gristmill.train.models.weights import load_model

    make_deterministic(1)
    folder = as_path(model)
    try:
        tasks = {task.name: read_task(task) for task in section.tasks}
        suites = {suite.suite: read_suite(suite) for suite in section.suites}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        reader = open_reader(load_model(folder, device), as_path(tokenizer or model))
        answers = answer_tasks(reader, section, tasks)
        summaries: dict[str, Any] = {
            name: result.summary for name, result in answers.items()
        }
        seed, samples = section.key_seed, section.bootstrap_samples
        for suite in section.suites:
            suite_tasks = suites[suite.suite]
            summaries[suite.suite] = asdict(
                answer_suite(reader, suite, suite_tasks, seed, samples)
            )
        return summaries
    except (FileNotFoundError, ValueError) as error:
        raise EvaluationError(str(error)) from error


def print_evaluation(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print tasks and suites by the tables of the report."""
    # A metric of a user's own may have any name of a suite's keys.
    tasks = {name: entry for name, entry in summaries.items() if "items" in entry}
    suites = {name: entry for name, entry in summaries.items() if "items" not in entry}
    measures = read_as(ModelMeasures, {"tasks": tasks, "suites": suites})
    models = [("this model", measures)]
    console = plain_console()
    print_table(console, task_table(models))
    for part in suite_parts(models):
        if isinstance(part, Table):
            print_table(console, part)
        else:
            section(console, inline_text(part.text))
