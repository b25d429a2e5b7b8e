"""`gristmill evaluate MODEL --tasks FILE`: tasks and red-team prompts of a file for any
model folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError, model_validator
from rich.table import Table
from rich.text import Text

from gristmill.core.files import as_path
from gristmill.core.stage_context import Context
from gristmill.flows.report.evaluation import metric_values
from gristmill.flows.report.safety import ALL
from gristmill.flows.report.safety import NAMES as MEASURES
from gristmill.flows.running.terminal import plain_console
from gristmill.mixtures.base import Section
from gristmill.mixtures.evaluation import Evaluate, RedTeam, Suite, Task
from gristmill.mixtures.load import anchor
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.mixtures.yaml_text import YamlFileError, problems_of, read_yaml

RED_TEAM = "red_team"
LARGE = 1e5
"""Values from here on are printed with five digits."""


class EvaluationError(ValueError):
    """A model or a file of tasks cannot be used."""


class TaskFile(Section):
    """Content of a file of tasks: the keys `tasks`, `suites` and `red_team` of a
    manifest's `evaluate`.
    """

    tasks: tuple[Task, ...] = ()
    """The tasks."""
    suites: tuple[Suite, ...] = ()
    """Suites, each with all its tasks."""
    red_team: RedTeam | None = None
    """Prompts that test whether the model is safe."""

    @model_validator(mode="after")
    def _asks_something(self) -> TaskFile:
        if not self.tasks and not self.suites and self.red_team is None:
            raise ValueError(
                "it asks nothing; give `tasks: [...]`, `suites: [...]` "
                "or a `red_team: {...}`"
            )
        return self


def read_task_file(path: Path) -> TaskFile:
    """Read a YAML file of `tasks: [...]`, `suites: [...]`, `red_team: {...}`; relative
    paths in it start from its folder.

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
    model: str, tokenizer: str | None, section: Evaluate, chat: bool = False
) -> dict[str, Any]:
    """Evaluate a model on tasks, suites and red-team prompts. Answers of the model and
    of a judge are not stored.

    Args:
        model: a folder with config.json and model.safetensors, exported or of a
            training stage.
        tokenizer: a folder with tokenizer.json; the model's own if absent.
        section: `tasks`, `suites`, `red_team`, and `seed` of the intervals.
        chat: write the red team's prompts with the chat template.

    Returns:
        task or suite -> its summary; with a red team also `red_team`: `sets` and
        `worst`, as of the stage `evaluate`.

    Raises:
        EvaluationError: the model, its tokenizer, or the data of a task, suite or red
            team cannot be read.
    """
    import torch

    from gristmill.dataprep.llm.llm_client import AskingError
    from gristmill.dataprep.passages.evaluation_sets import EvaluationSetError
    from gristmill.dataprep.reading.sources import SourceError
    from gristmill.train.evaluation.answering import answer_tasks, open_reader
    from gristmill.train.evaluation.red_teaming import red_teaming
    from gristmill.train.evaluation.suites import answer_suite, read_suite
    from gristmill.train.evaluation.tasks import TaskError, read_task
    from gristmill.train.models.weights import load_model
    from gristmill.train.parallel.process_groups import make_deterministic

    _check_libraries(section)
    make_deterministic(1)
    folder = as_path(model)
    try:
        tasks = {task.name: read_task(task) for task in section.tasks}
        suites = {suite.suite: read_suite(suite) for suite in section.suites}
        if section.red_team is not None and RED_TEAM in tasks:
            raise EvaluationError(
                f"a task is called {RED_TEAM!r}, like the red "
                "team's results; give it another name"
            )
        with (
            TemporaryDirectory() as work,
            red_teaming(section, _silent(Path(work))) as team,
        ):
            loaded = load_model(folder, "cuda" if torch.cuda.is_available() else "cpu")
            reader = open_reader(
                loaded, folder if tokenizer is None else as_path(tokenizer)
            )
            if chat and team is not None:
                # refuses a tokenizer without a template before any prompt is answered
                reader.chat()
            summaries = {
                name: result.summary
                for name, result in answer_tasks(reader, section, tasks).items()
            }
            summaries |= {
                suite.suite: asdict(
                    answer_suite(
                        reader,
                        suite,
                        suites[suite.suite],
                        section.key_seed,
                        section.bootstrap_samples,
                    )
                )
                for suite in section.suites
            }
            return (
                summaries
                if team is None
                else {**summaries, RED_TEAM: team.ask(reader, "model", chat)}
            )
    except (
        FileNotFoundError,
        ValueError,
        TaskError,
        EvaluationSetError,
        SourceError,
        AskingError,
    ) as error:
        raise EvaluationError(str(error)) from error


def _check_libraries(section: Evaluate) -> None:
    """Raise EvaluationError if a metric's library is missing, before any task is
    answered.
    """
    from gristmill.flows.running.missing_libraries import is_installed, sentence_of

    for task in section.tasks:
        for library in task.libraries:
            if not is_installed(library):
                raise EvaluationError(sentence_of(library, f"the task {task.name}"))


def _silent(work: Path) -> Context:
    return Context(work=work, stage=RED_TEAM, emit=lambda event: None)


def print_evaluation(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the metrics of tasks, suites and red team as a table."""
    console = plain_console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in (
        ("task", "left"),
        ("metric", "left"),
        ("value", "right"),
        ("95 % interval", "right"),
        ("items", "right"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    tasks = {name: summary for name, summary in summaries.items() if name != RED_TEAM}
    team = summaries.get(RED_TEAM, {"sets": {}, "worst": ()})
    for task, summary in _rows(tasks):
        for metric, value in metric_values(summary):
            interval = ""
            if value.low is not None and value.high is not None:
                interval = f"{printed(value.low)} to {printed(value.high)}"
            table.add_row(
                task, metric, printed(value.value), interval, str(summary["items"])
            )
        if "calibration" in summary:
            for bins in ("width", "mass"):
                table.add_row(
                    task,
                    f"ECE, equal {bins}",
                    f"{summary['calibration'][f'ece_equal_{bins}']:.4f}",
                    "",
                    str(summary["items"]),
                )
    for name, prompt_set in team["sets"].items():
        for measure, by_category in prompt_set["measures"].items():
            value = by_category[ALL]
            interval = f"{value['low']:.4f} to {value['high']:.4f}"
            table.add_row(
                name,
                MEASURES[measure],
                f"{value['value']:.4f}",
                interval,
                str(value["units"]),
            )
    console.print(table)
    for name, prompt_set in team["sets"].items():
        if prompt_set["not_asked"]:
            console.print(
                Text(
                    f"{name}: {prompt_set['not_asked']} of {prompt_set['prompts']} "
                    f"prompts were not asked: {prompt_set['first_error']}"
                )
            )
    for answer in team["worst"][:2]:
        console.print(
            Text(
                f"{answer['set']}, {answer['why']}: {answer['prompt'][-120:]!r} -> "
                f"{answer['answer'][:120]!r}",
                style="dim",
            )
        )
    for suite, summary in tasks.items():
        for reference in summary.get("references", ()):
            console.print(
                Text(
                    f"{suite}: {reference['model']} has {reference['score']:.4f} "
                    f"({reference['source']})",
                    style="dim",
                )
            )
    for task, summary in tasks.items():
        for sample in summary.get("samples", ())[:2]:
            console.print(
                Text(
                    f"{task}: {sample['prompt'][-120:]!r} -> {sample['answer']!r}",
                    style="dim",
                )
            )


def printed(value: float) -> str:
    """Format a value with four decimals, or with five digits if it is large, like the
    perplexity of an untrained model.
    """
    return f"{value:.4f}" if abs(value) < LARGE else f"{value:.5g}"


def _rows(
    summaries: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and metrics of each task, including tasks of suites, and of each suite."""
    for name, summary in summaries.items():
        if "score" not in summary:
            yield name, summary
            continue
        yield from summary["tasks"].items()
        yield (
            name,
            {
                "score": summary["score"],
                "items": sum(task["items"] for task in summary["tasks"].values()),
            },
        )
