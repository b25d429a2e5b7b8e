"""`gristmill evaluate MODEL --tasks FILE`: any model that is a folder, asked the tasks of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from rich.table import Table
from rich.text import Text

from gristmill.dataprep.files import as_path
from gristmill.flows.report.evaluation import metric_values
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.evaluation import Evaluate, Task
from gristmill.mixtures.load import anchor
from gristmill.mixtures.own_code import OwnCodeError
from gristmill.mixtures.section import Section
from gristmill.mixtures.yaml_text import YamlFileError, problems_of, read_yaml


class EvaluationError(ValueError):
    """A model or a file of tasks cannot be used."""


class TaskFile(Section):
    """What a file of tasks holds: the same as `evaluate.tasks` of a manifest."""

    tasks: tuple[Task, ...] = Field(min_length=1)
    """The tasks."""


def read_task_file(path: Path) -> tuple[Task, ...]:
    """Read a YAML file `tasks: [...]`; relative paths in it begin at its folder.

    Raises:
        EvaluationError: it is no such file, with everything that is wrong.
    """
    try:
        read = read_yaml(path)
        if not isinstance(read, dict):
            raise EvaluationError(f"{path}: a file of tasks is a mapping `tasks: [...]`; see evaluate.tasks in: "
                                  "gristmill schema --markdown")
        tasks = TaskFile.model_validate(read).tasks
    except YamlFileError as error:
        raise EvaluationError(str(error)) from error
    except ValidationError as error:
        raise EvaluationError(f"{path}: {problems_of(error)}") from error
    try:
        return tuple(anchor(task, path.resolve().parent) for task in tasks)
    except OwnCodeError as error:
        raise EvaluationError(f"{path}: {error}") from error


def evaluate_folder(model: str, tokenizer: str | None, tasks: tuple[Task, ...], seed: int) -> dict[str, Any]:
    """Ask a model all tasks.

    Args:
        model: a folder with config.json and model.safetensors, as exported or as a training stage leaves it.
        tokenizer: a folder with tokenizer.json; the model's own if absent.
        tasks: what to ask.
        seed: of the intervals.

    Returns:
        task -> its summary.

    Raises:
        EvaluationError: model or tokenizer cannot be loaded, or a task cannot be asked.
    """
    import torch

    from gristmill.dataprep.passages.evaluation_sets import EvaluationSetError
    from gristmill.dataprep.reading.sources import SourceError
    from gristmill.train.evaluation.answering import answer_tasks, open_reader
    from gristmill.train.evaluation.metrics import MissingLibraryError
    from gristmill.train.evaluation.tasks import TaskError, read_task
    from gristmill.train.models.weights import load_model
    from gristmill.train.parallel.world import make_deterministic

    make_deterministic(1)
    folder = as_path(model)
    try:
        asked = {task.name: read_task(task) for task in tasks}
        section = Evaluate(tasks=tasks, seed=seed)
        loaded = load_model(folder, "cuda" if torch.cuda.is_available() else "cpu")
        reader = open_reader(loaded, folder if tokenizer is None else as_path(tokenizer))
        return {name: result.summary for name, result in answer_tasks(reader, section, asked).items()}
    except (FileNotFoundError, ValueError, TaskError, EvaluationSetError, SourceError, MissingLibraryError) as error:
        raise EvaluationError(str(error)) from error


def print_evaluation(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the tasks' metrics for people."""
    console = plain_console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in (("task", "left"), ("metric", "left"), ("value", "right"), ("95 % interval", "right"),
                          ("items", "right")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for task, summary in found.items():
        for metric, value in metric_values(summary):
            interval = f"{value['low']:.4f} to {value['high']:.4f}" if "low" in value else ""
            table.add_row(task, metric, f"{value['value']:.4f}", interval, str(summary["items"]))
        if "calibration" in summary:
            for bins in ("width", "mass"):
                table.add_row(task, f"ECE, equal {bins}", f"{summary['calibration'][f'ece_equal_{bins}']:.4f}", "",
                              str(summary["items"]))
    console.print(table)
    for task, summary in found.items():
        for sample in summary.get("samples", ())[:2]:
            console.print(Text(f"{task}: {sample['prompt'][-120:]!r} -> {sample['answer']!r}", style="dim"))
