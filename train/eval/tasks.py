"""Evaluation tasks as items: context, answers, and the right answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jinja2

from gristmill.core.files import as_path
from gristmill.dataprep.decontamination.evaluation_sets import read_items
from gristmill.dataprep.examples.conversations import Message
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


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        number: of the item in its file, from 1.
        context: text before an answer, including solved examples; empty for `rolling`.
        answers: `multiple_choice`: all choices; `cloze`: the one answer; `rolling`: the
            full text; `generate`: the references. Without the delimiter.
        right: index of the right answer.
        messages: `context` as turns of a conversation, the last one the user's; empty
            for `rolling`.
        question: the item's own text without the shots, its right answer included; the
            text to search for in training data.
    """

    number: int
    context: str
    answers: tuple[str, ...]
    right: int
    question: str
    messages: tuple[Message, ...] = ()


def read_task(task: Task) -> list[Item]:
    """Read and render all items of a task.

    Raises:
        TaskError: an item lacks a field, its right answer is not among its choices, or
            no item is left.
        gristmill.dataprep.decontamination.evaluation_sets.EvaluationSetError: a file cannot be
            read.
        gristmill.dataprep.readers.sources.SourceError: the path matches nothing.
    """
    records = _records(task, task.path)
    solved: Sequence[Record] = ()
    if task.num_fewshot:
        shot_records = (
            records if task.fewshot_path is None else _records(task, task.fewshot_path)
        )
        solved = shot_records[: task.num_fewshot]
        if len(solved) < task.num_fewshot:
            raise TaskError(
                f"task {task.name}: {task.fewshot_path or task.path} has {len(solved)} "
                f"items, fewer than the {task.num_fewshot} shots"
            )
    shots = ""
    messages: list[Message] = []
    for number, record in enumerate(solved, start=1):
        item = _item(task, number, record)
        answer = item.answers[item.right]
        shots += item.context + task.target_delimiter + answer + task.fewshot_delimiter
        messages += [*item.messages, {"role": "assistant", "content": answer}]
    first = len(solved) if task.fewshot_path is None else 0
    items = []
    for number, record in enumerate(
        islice(records[first:], task.limit), start=first + 1
    ):
        item = _item(task, number, record)
        items.append(
            replace(
                item,
                context=shots + item.context,
                messages=(*messages, *item.messages),
            )
        )
    if not items:
        raise TaskError(
            f"task {task.name}: {task.path} has no item left to ask (it has "
            f"{len(records)}, of which {first} are shots)"
        )
    return items


def _records(task: Task, path: str) -> list[Record]:
    """Records of all files of a path: a file, a glob or a folder."""
    return [
        record
        for name, location in outside_files(f"task {task.name}", path)
        for record in read_items(name, as_path(location))
    ]


def _item(task: Task, number: int, record: Record) -> Item:
    """Item without shots."""
    at = f"task {task.name}, item {number}"
    prompt = _text(at, task.prompt, record)
    if task.kind == "rolling":
        return Item(number, "", (prompt,), 0, prompt)
    right = 0
    if task.kind == "multiple_choice":
        answers, right = _choices(at, task, record)
    else:
        answer = _value(at, task.answer, record)
        answers = tuple(answer) if isinstance(answer, list) else (str(answer),)
        if not answers or not all(isinstance(text, str) for text in answers):
            raise TaskError(
                f"{at}: the answer {answer!r} is neither a text nor a list of texts"
            )
    question = prompt + task.target_delimiter + answers[right]
    message: Message = {"role": "user", "content": prompt}
    return Item(number, prompt, answers, right, question, (message,))


def _choices(at: str, task: Task, record: Record) -> tuple[tuple[str, ...], int]:
    """Choices, and the index of the right one, which is written as an index, a letter
    or the text itself.
    """
    if isinstance(task.choices, str):
        texts = _value(at, task.choices, record)
        # as of ARC on the hub: {"text": [...], "label": [...]}
        if isinstance(texts, Mapping):
            texts = texts.get("text")
        if not isinstance(texts, list) or len(texts) < 2:
            raise TaskError(
                f"{at}: {task.choices!r} is not a list of at least two choices: "
                f"{texts!r}"
            )
        choices = tuple(str(text) for text in texts)
    else:
        choices = tuple(
            choice
            if FIELD.fullmatch(choice) and choice not in record
            else _text(at, choice, record)
            for choice in task.choices
        )
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
            f"{at}: the answer {answer!r} is none of its {len(choices)} choices (a "
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
