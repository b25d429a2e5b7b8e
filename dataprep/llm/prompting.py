"""Requests, answers, and JSON parsing of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gristmill.dataprep.examples.conversations import Message

MOST_TRIED = 50
"""Largest number of braces in a text at which parsing is tried."""
SHOWN_CHARACTERS = 200
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_THOUGHT = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)

Schema = Mapping[str, Any]
"""JSON schema of an answer."""


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        messages: conversation that the model continues.
        ids: tokens to score instead, in vLLM's completions API.
        schema: JSON schema of the answer; any text if None.
        pattern: regular expression of an answer that is not JSON, with a group for each
            property of the schema.
        number: index among several answers to the same prompt.
        about: ids of the documents that the prompt is about, in hexadecimal, separated
            by blanks: forgetting one of them forgets the answer.
    """

    messages: Sequence[Message]
    schema: Schema | None = None
    number: int = 0
    about: str | None = None
    ids: Sequence[int] = ()
    pattern: str | None = None


@dataclass(frozen=True)
class Answer:
    """Outcome of a request.

    Attributes:
        text: the model's last text; empty if the request was refused.
        value: parsed JSON, if the request has a schema.
        error: reason for having no usable answer, or None.
        finish: the endpoint's finish reason; `length` if the text was cut.
        repaired: True if a second request was needed.
    """

    text: str
    value: Any = None
    error: str | None = None
    finish: str = "stop"
    repaired: bool = False


def prompt(
    text: str,
    schema: Schema | None = None,
    number: int = 0,
    about: str | None = None,
    pattern: str | None = None,
) -> Request:
    """Request with one user message."""
    messages: list[Message] = [{"role": "user", "content": text}]
    return Request(messages, schema, number, about, pattern=pattern)


def read_json_answer(text: str, schema: Schema) -> tuple[Any, str | None]:
    """Parse the JSON object in an answer; return it and its problem, one of which is
    None.

    Models put JSON between other words: the first object that matches the schema is
    returned; the problem is that of the first object.
    """
    validator = _validator(json.dumps(schema))
    first: str | None = None
    for value in _objects(text):
        error = min(
            validator.iter_errors(value),
            key=lambda violation: violation.json_path,
            default=None,
        )
        if error is None:
            return value, None
        first = first or f"{error.json_path}: {shorten(error.message)}"
    return None, first or "there is no JSON object in it"


def read_pattern_answer(
    text: str, pattern: str, schema: Schema
) -> tuple[Any, str | None]:
    """Read the properties that the groups of a pattern match; return them and their
    problem, as of `read_json_answer`.
    """
    match = re.fullmatch(pattern, text.strip())
    if match is None:
        return None, f"it does not match `pattern`: {shorten(text)}"
    read = {"integer": int, "number": float}
    values = {
        name: read.get(schema["properties"][name]["type"], str)(value)
        for name, value in match.groupdict().items()
        if value is not None
    }
    return read_json_answer(json.dumps(values), schema)


@lru_cache(maxsize=16)
def _validator(schema: str) -> Any:
    """A validator of a schema's JSON; making one takes as long as validating a short
    answer.
    """
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(schema))


def _objects(text: str) -> list[Any]:
    """JSON objects in a text: the text itself, a fenced code block, or objects that
    start at a brace.
    """
    body = _THOUGHT.sub("", text).strip()
    for candidate in (body, *_FENCED.findall(body)):
        try:
            return [json.loads(candidate)]
        except (ValueError, RecursionError):
            continue
    objects = []
    start = body.find("{")
    decoder = json.JSONDecoder()
    for _ in range(MOST_TRIED):
        if start < 0:
            break
        try:
            value, end = decoder.raw_decode(body, start)
            objects.append(value)
        except (ValueError, RecursionError):
            end = start + 1
        start = body.find("{", end)
    return objects


def json_schema_problem(schema: Schema) -> str | None:
    """Problem of a JSON schema, or None."""
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(dict(schema))
    except SchemaError as error:
        return f"{error.json_path}: {shorten(error.message)}"
    return None


def pattern_problem(pattern: str, schema: Schema) -> str | None:
    """Problem of a pattern of answers, or None."""
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        return f"it is not a regular expression: {error}"
    unknown = sorted(groups.keys() ^ schema["properties"].keys())
    return f"its groups are not the properties: {unknown}" if unknown else None


def shorten(text: str) -> str:
    """First SHOWN_CHARACTERS characters of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."
