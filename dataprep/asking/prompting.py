"""What is asked and what comes back: requests, answers, and JSON in what a model has written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_TRIED = 50
"""Braces of a text at which an object is looked for."""
SHOWN_CHARACTERS = 200
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_THOUGHT = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)

Message = Mapping[str, str]
"""`role` and `content`."""


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        messages: the conversation that the model is to continue.
        schema: JSON schema that the answer must have; any text will do if None.
        number: which of several answers to the same prompt.
        about: the ids of the documents that it is about, in hexadecimal, with blanks between: what is answered is
            forgotten with any of them.
    """

    messages: Sequence[Message]
    schema: Mapping[str, Any] | None = None
    number: int = 0
    about: str | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        text: what the model wrote last; empty where it was refused.
        value: of a request with a schema, what the text says as JSON.
        error: why there is no usable answer, or None.
        finish: why the model ended, as the endpoint calls it: `length` where it was cut.
        repaired: whether it took a second request.
    """

    text: str
    value: Any = None
    error: str | None = None
    finish: str = "stop"
    repaired: bool = False


def prompt(
    text: str,
    schema: Mapping[str, Any] | None = None,
    system: str | None = None,
    number: int = 0,
    about: str | None = None,
) -> Request:
    """A request of one message."""
    before: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return Request((*before, {"role": "user", "content": text}), schema, number, about)


def read_json_answer(text: str, schema: Mapping[str, Any]) -> tuple[Any, str | None]:
    """The object in an answer, and what is wrong with it, or None.

    Models put JSON between other words: the first object of the text that fits the schema counts; what is wrong is
    said of the first object.
    """
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema)
    first: str | None = None
    for value in _objects(text):
        error = next(iter(sorted(validator.iter_errors(value), key=lambda one: one.json_path)), None)
        if error is None:
            return value, None
        first = first or f"{error.json_path}: {shorten(error.message)}"
    return None, first or "there is no JSON object in it"


def _objects(text: str) -> list[Any]:
    """The JSON objects in a text: the whole, what is fenced off as code, or what begins with a brace."""
    rest = _THOUGHT.sub("", text).strip()
    for whole in (rest, *_FENCED.findall(rest)):
        try:
            return [json.loads(whole)]
        except (ValueError, RecursionError):
            continue
    found, at, decoder = [], rest.find("{"), json.JSONDecoder()
    for _ in range(MOST_TRIED):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(rest, at)
            found.append(value)
        except (ValueError, RecursionError):
            end = at + 1
        at = rest.find("{", end)
    return found


def repair_messages(messages: Sequence[Message], text: str, error: str, schema: Mapping[str, Any]) -> list[Message]:
    """The conversation that asks once more for an answer of the right form."""
    return [
        *messages,
        {"role": "assistant", "content": text or "(nothing)"},
        {
            "role": "user",
            "content": f"This answer cannot be used: {error}. Answer again, with nothing but a JSON "
            f"object of this schema:\n{json.dumps(schema, sort_keys=True)}",
        },
    ]


def json_schema_problem(schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a JSON schema, or None."""
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(dict(schema))
    except SchemaError as error:
        return f"{error.json_path}: {shorten(error.message)}"
    return None


def shorten(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."
