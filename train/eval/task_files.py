"""Tasks in files of the user's: items with their prompts and answers rendered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

import jinja2

from gristmill.core.files import as_path
from gristmill.dataprep.decontamination.evaluation_sets import read_items
from gristmill.dataprep.readers.sources import outside_files
from gristmill.mixtures.schema.evaluation import Task
from gristmill.tokenize.bounded_jinja import BoundedEnvironment, render

FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ENVIRONMENT = BoundedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)
Record = Mapping[str, Any]
"""Record of a file of tasks: a JSON object or a row with any keys."""


class TaskError(ValueError):
    """A task that cannot be evaluated: its file or an item is not as configured."""


def read_task(task: Task) -> dict[str, list[Record]]:
    """Read and render the items of a task with files of the user's.

    An item has `prompt`; `choices` if it is of kind multiple_choice; and `target`: the
    place of the right choice, the references of a generated text, or the text to score.

    Returns:
        the items to ask, `asked`, and those to show solved before each, `solved`.

    Raises:
        TaskError: an item lacks a field or has an empty text, its right answer is not
            among its choices, or no item is left.
        gristmill.dataprep.decontamination.evaluation_sets.EvaluationSetError: a file cannot be
            read.
        gristmill.dataprep.readers.sources.SourceError: the path matches nothing.
    """
    records = _records(task, task.path)
    num_solved = task.num_fewshot or 0
    first = num_solved if task.fewshot_path is None else 0
    shots = records if task.fewshot_path is None else _records(task, task.fewshot_path)
    if len(shots) < num_solved:
        raise TaskError(
            f"task {task.name}: {task.fewshot_path or task.path} has {len(shots)} "
            f"items, fewer than the {num_solved} shots"
        )
    asked = [
        _item(task, number, record)
        for number, record in enumerate(
            islice(records[first:], task.limit), start=first + 1
        )
    ]
    if not asked:
        raise TaskError(
            f"task {task.name}: {task.path} has no item left to ask (it has "
            f"{len(records)}, of which {first} are shots)"
        )
    solved = [
        _item(task, number, record)
        for number, record in enumerate(shots[:num_solved], start=1)
    ]
    return {"asked": asked, "solved": solved}


def _records(task: Task, path: str) -> list[Record]:
    """Records of all files of a path: a file, a glob or a folder."""
    return [
        record
        for name, location in outside_files(f"task {task.name}", path)
        for record in read_items(name, as_path(location))
    ]


def _item(task: Task, number: int, record: Record) -> Record:
    """Item of `read_task`."""
    at = f"task {task.name}, item {number}"
    prompt = _text(at, task.prompt, record)
    item: dict[str, Any] = {"prompt": prompt}
    if task.kind == "rolling":
        item = {"prompt": "", "target": prompt}
        scored = [prompt]
    elif task.kind == "multiple_choice":
        scored, item["target"] = choices_of(at, task, record)
        item["choices"] = scored
    else:
        answer = _value(at, task.answer, record)
        references = answer if isinstance(answer, list) else [str(answer)]
        if not references or not all(isinstance(text, str) for text in references):
            raise TaskError(
                f"{at}: the answer {answer!r} is neither a text nor a list of texts"
            )
        scored = references[:1] if task.kind == "cloze" else []
        item["target"] = scored[0] if scored else references
    if "" in scored:
        raise TaskError(f"{at}: a text to score is empty")
    return item


def choices_of(at: str, task: Task, record: Record) -> tuple[list[str], int]:
    """Choices, and the index of the right one, which is written as an index, a letter
    or the text itself.
    """
    if isinstance(task.choices, str):
        texts = _value(at, task.choices, record)
        if not isinstance(texts, list) or len(texts) < 2:
            raise TaskError(
                f"{at}: {task.choices!r} is not a list of at least two choices: "
                f"{texts!r}"
            )
        choices = [str(text) for text in texts]
    else:
        choices = [
            choice
            if FIELD.fullmatch(choice) and choice not in record
            else _text(at, choice, record)
            for choice in task.choices
        ]
    answer = _value(at, task.answer, record)
    if answer in choices:
        return choices, choices.index(answer)
    text = str(answer).strip()
    place = -1
    if text.isdecimal():
        place = int(text)
    elif len(text) == 1:
        place = ord(text.upper()) - ord("A")
    if not 0 <= place < len(choices):
        raise TaskError(
            f"{at}: the answer {answer!r} is not one of its {len(choices)} choices (a "
            "place from 0, a letter from A, or a text)"
        )
    return choices, place


def _value(at: str, template: str, record: Record) -> Any:
    """Value of the field for a bare name, else the rendered text."""
    if FIELD.fullmatch(template):
        if template not in record:
            raise TaskError(f"{at}: no field {template!r}; it has {', '.join(record)}")
        return record[template]
    return _text(at, template, record)


def _text(at: str, template: str, record: Record) -> str:
    if FIELD.fullmatch(template):
        return str(_value(at, template, record))
    try:
        return render(ENVIRONMENT.from_string(template), **record)
    except jinja2.TemplateError as error:
        raise TaskError(
            f"{at}: the template {template!r} cannot be rendered: {error}"
        ) from error
