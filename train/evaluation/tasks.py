"""Evaluation tasks as items: context, answers, and the right answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import jinja2

from gristmill.core.files import as_path
from gristmill.dataprep.examples.conversations import Message
from gristmill.dataprep.passages.evaluation_sets import read_items
from gristmill.dataprep.reading.sources import outside_files
from gristmill.mixtures.evaluation import Task
from gristmill.tokenize.encoding.bounded_jinja import BoundedEnvironment, render

FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Record = Mapping[str, Any]
"""Record of a file of tasks or prompts: a JSON object or a row with any keys."""


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


@dataclass(frozen=True)
class _Shots:
    """Solved items, as text and as turns of a conversation."""

    text: str
    messages: tuple[Message, ...]


NO_SHOTS = _Shots("", ())


def read_task(task: Task) -> list[Item]:
    """Read and render all items of a task.

    Raises:
        TaskError: an item lacks a field, its right answer is not among its choices, or
            no item is left.
        gristmill.dataprep.passages.evaluation_sets.EvaluationSetError: a file cannot be
            read.
        gristmill.dataprep.reading.sources.SourceError: the path matches nothing.
    """
    records = read_records(f"task {task.name}", task.path)
    shots, first = _shots(task, records)
    records_to_ask = list(islice(records[first:], task.limit))
    if not records_to_ask:
        raise TaskError(
            f"task {task.name}: {task.path} has no item left to ask (it has "
            f"{len(records)}, of which {first} are shots)"
        )
    return [
        _item(task, number, record, shots)
        for number, record in enumerate(records_to_ask, start=first + 1)
    ]


def read_records(where: str, path: str) -> list[Record]:
    """Records of all files of a path.

    Args:
        where: setting with the path, for messages.
        path: a file, a glob or a folder.
    """
    return [
        record
        for name, location in outside_files(where, path)
        for record in read_items(name, as_path(location))
    ]


def _shots(task: Task, records: Sequence[Record]) -> tuple[_Shots, int]:
    """Solved items, and their number in the task's own file."""
    if not task.num_fewshot:
        return NO_SHOTS, 0
    from_task_file = task.fewshot_path is None
    if task.fewshot_path is not None:
        records = read_records(f"task {task.name}", task.fewshot_path)
    solved = records[: task.num_fewshot]
    if len(solved) < task.num_fewshot:
        raise TaskError(
            f"task {task.name}: {task.fewshot_path or task.path} has {len(solved)} "
            f"items, fewer than the {task.num_fewshot} shots"
        )
    texts = []
    messages: list[Message] = []
    for number, record in enumerate(solved, start=1):
        item = _item(task, number, record, NO_SHOTS)
        answer = item.answers[item.right]
        texts.append(
            item.context + task.target_delimiter + answer + task.fewshot_delimiter
        )
        messages += [*item.messages, {"role": "assistant", "content": answer}]
    return _Shots("".join(texts), tuple(messages)), len(solved) if from_task_file else 0


def _item(task: Task, number: int, record: Record, shots: _Shots) -> Item:
    at = f"task {task.name}, item {number}"
    prompt = _text(at, task.prompt, record)
    if task.kind == "rolling":
        return Item(number, "", (prompt,), 0, prompt)
    right = 0
    if task.kind == "multiple_choice":
        answers = _choices(at, task.choices, record)
        right = _right(at, _value(at, task.answer, record), answers)
    else:
        answer = _value(at, task.answer, record)
        answers = tuple(answer) if isinstance(answer, list) else (str(answer),)
        if not answers or not all(isinstance(text, str) for text in answers):
            raise TaskError(
                f"{at}: the answer {answer!r} is neither a text nor a list of texts"
            )
    asked: Message = {"role": "user", "content": prompt}
    return Item(
        number,
        shots.text + prompt,
        answers,
        right,
        prompt + task.target_delimiter + answers[right],
        (*shots.messages, asked),
    )


def _choices(
    at: str, choices: str | tuple[str, ...], record: Record
) -> tuple[str, ...]:
    if not isinstance(choices, str):
        return tuple(
            choice
            if FIELD.fullmatch(choice) and choice not in record
            else _text(at, choice, record)
            for choice in choices
        )
    value = _value(at, choices, record)
    # as of ARC on the hub: {"text": [...], "label": [...]}
    if isinstance(value, Mapping):
        value = value.get("text")
    if not isinstance(value, list) or len(value) < 2:
        raise TaskError(
            f"{at}: {choices!r} is not a list of at least two choices: {value!r}"
        )
    return tuple(str(choice) for choice in value)


def _right(at: str, value: Any, choices: Sequence[str]) -> int:
    """Index of the right choice, from an index, a letter or the text itself."""
    text = str(value).strip()
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and 0 <= value < len(choices)
    ):
        return value
    if value in choices:
        return choices.index(value)
    if text.isdecimal() and int(text) < len(choices):
        return int(text)
    if len(text) == 1 and 0 <= ord(text.upper()) - ord("A") < len(choices):
        return ord(text.upper()) - ord("A")
    raise TaskError(
        f"{at}: the answer {value!r} is none of its {len(choices)} choices (a place "
        "from 0, a letter from A, or a text)"
    )


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
        return render(_environment().from_string(template), **record)
    except jinja2.TemplateError as error:
        raise TaskError(
            f"{at}: the template {template!r} cannot be rendered: {error}"
        ) from error


@cache
def _environment() -> BoundedEnvironment:
    return BoundedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
