"""`gristmill evaluate MODEL --tasks FILE`: tasks and suites of a file for any model
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gristmill.core.files import as_path
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.report.evaluation import suite_parts, task_table
from gristmill.flows.report.stage_summaries import ModelMeasures, read_as
from gristmill.mixtures.loader import anchor
from gristmill.mixtures.schema.evaluation import Evaluate
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.mixtures.yaml_text import YamlFileError, problems_of, read_yaml


class EvaluationError(ValueError):
    """A model or a file of tasks cannot be used."""


def read_task_file(path: Path) -> Evaluate:
    """Read a YAML file of `tasks: [...]` and `suites: [...]`, as in a manifest's
    `evaluate`; relative paths in it start from its folder.

    Raises:
        EvaluationError: the file is invalid; the message has all problems.
    """
    try:
        section = Evaluate.model_validate(read_yaml(path))
        anchored: Evaluate = anchor(section, path.resolve().parent)
        return anchored
    except YamlFileError as error:
        raise EvaluationError(str(error)) from error
    except ValidationError as error:
        raise EvaluationError(f"{path}: {problems_of(error)}") from error
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
        `tasks` and `suites`, as of a model in `evaluation.json`.

    Raises:
        EvaluationError: the model, its tokenizer, or the data of a task or suite cannot
            be read.
    """
    import torch

    from gristmill.train.distributed.process_groups import make_deterministic
    from gristmill.train.eval.suites import answer_suites, read_suite
    from gristmill.train.eval.tasks import answer_tasks, open_tasks
    from gristmill.train.generation.language_model import with_tokenizer
    from gristmill.train.models.weights import load_model

    make_deterministic(1)
    folder = as_path(model)
    try:
        tasks = open_tasks(section.tasks)
        suites = {str(suite.suite): read_suite(suite) for suite in section.suites}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        language = with_tokenizer(
            load_model(folder, device), as_path(tokenizer or model)
        )
        answers = answer_tasks(language, section, tasks)
        return {
            "tasks": {name: result.summary for name, result in answers.items()},
            "suites": answer_suites(language, section, suites),
        }
    except (FileNotFoundError, ValueError) as error:
        raise EvaluationError(str(error)) from error


def print_evaluation(evaluation: Mapping[str, Mapping[str, Any]]) -> None:
    """Print tasks and suites by the tables of the report."""
    models = [("this model", read_as(ModelMeasures, evaluation))]
    print_parts(task_table(models), suite_parts(models))
