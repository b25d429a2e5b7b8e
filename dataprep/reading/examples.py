"""Instructions (SFT) and preferences (DPO): one shape for every form in which they come.

An SFT example is `{"id", "messages"}`, a DPO example `{"id", "prompt", "chosen", "rejected"}`; `id` is the hash of
the rest, all else are lists of `{"role", "content"}`. Accepted, one JSON object a line (JSON lines, compressed or not):

    sft: messages | prompt + completion (or response) | instruction + output (and input)
    dpo: prompt + chosen + rejected, strings or messages; chosen and rejected may repeat the prompt's messages

`python-docs://` derives both from the docstrings of the standard library.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from gristmill.dataprep.files import as_path, canonical_json
from gristmill.dataprep.reading.compression import CorruptFileError, RecordTooLongError, read_lines
from gristmill.dataprep.reading.docquestions import QUESTIONS_VERSION, preferences, questions
from gristmill.dataprep.reading.pythondocs import DOCS
from gristmill.dataprep.reading.readers import BYTE_ORDER_MARK, parse_json
from gristmill.dataprep.reading.sources import SourceError, SourceFile, find_files, listing

ROLES = ("system", "user", "assistant")
SHOWN_ERRORS = 20

Kind = Literal["sft", "dpo"]
Message = dict[str, str]
Example = dict[str, Any]


class ExamplesError(ValueError):
    """Examples that cannot be used, with file and line of each."""


def read_examples(path: str, kind: Kind, limit: int | None = None) -> list[Example]:
    """Read all examples of a file, glob, folder or `python-docs://`, in the order of their ids.

    Args:
        path: JSON lines (.jsonl, .gz, .zst, .bz2), or `python-docs://`.
        kind: `sft` or `dpo`.
        limit: keep the first so many, in that order.

    Raises:
        ExamplesError: there are none, or some are not of a known form; lists the first 20 of these.
    """
    if path == DOCS:
        contents = questions() if kind == "sft" else preferences()
    else:
        contents = _read_files(path, kind)
    if not contents:
        raise ExamplesError(f"{path}: holds no examples")
    examples = [{"id": example_id(content), **content} for content in contents]
    examples.sort(key=lambda example: example["id"])
    return examples[:limit]


def examples_listing(path: str) -> list[dict[str, Any]]:
    """What fingerprints a set of examples: `path`, `size`, `stamp` of each file, or Python's version.

    Raises:
        ExamplesError: the path matches nothing.
    """
    if path == DOCS:
        stamps = {"python": sys.version, "questions": str(QUESTIONS_VERSION)}
        return [{"path": name, "size": 0, "stamp": stamp} for name, stamp in stamps.items()]
    try:
        return listing("examples", {"path": path, "format": "jsonl"})
    except SourceError as error:
        raise ExamplesError(str(error)) from error


def example_id(content: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that name an example by its content."""
    return hashlib.blake2b(canonical_json(content), digest_size=16).hexdigest()


def _read_files(path: str, kind: Kind) -> list[Example]:
    try:
        files = find_files("examples", {"path": path, "format": "jsonl"}).files
    except SourceError as error:
        raise ExamplesError(str(error)) from error
    found: list[Example] = []
    errors: list[str] = []
    for file in files:
        for line, example in _read_file(file, _FORMS[kind]):
            if isinstance(example, dict):
                found.append(example)
            else:
                errors.append(f"{file.name}:{line}: {example}")
    if errors:
        more = f"\n  and {len(errors) - SHOWN_ERRORS} more" if len(errors) > SHOWN_ERRORS else ""
        raise ExamplesError(
            f"{path}: {len(errors)} lines are no {kind} examples (correct or remove them):\n  "
            + "\n  ".join(errors[:SHOWN_ERRORS]) + more
        )  # fmt: skip
    return found


def _read_file(file: SourceFile, form: Callable[[Mapping[str, Any]], Example]) -> Iterator[tuple[int, Example | str]]:
    """The examples of a file, or what is wrong with them, by line number."""
    number = 0
    try:
        for number, line in enumerate(read_lines(as_path(file.location), file.compression), start=1):
            if isinstance(line, RecordTooLongError):
                yield number, str(line)
                continue
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if line and not line.isspace():
                yield number, _parse(line, form)
    except CorruptFileError as error:
        yield number + 1, str(error)


def _parse(line: bytes, form: Callable[[Mapping[str, Any]], Example]) -> Example | str:
    try:
        row = parse_json(line)
        if not isinstance(row, dict):
            return "a JSON object was expected"
        return form(row)
    except ValueError as error:
        return str(error)


def sft_example(row: Mapping[str, Any]) -> Example:
    """Bring a row into the shape of an SFT example (without `id`).

    Raises:
        ValueError: it is of no known form; says why.
    """
    if "messages" in row:
        messages = _messages("messages", row["messages"])
    elif "prompt" in row and ("completion" in row or "response" in row):
        answer = "completion" if "completion" in row else "response"
        messages = _turns("prompt", row["prompt"], "user") + _turns(answer, row[answer], "assistant")
    elif "instruction" in row and "output" in row:
        question, more = _string("instruction", row["instruction"]), row.get("input") or ""
        if not isinstance(more, str):
            raise ValueError("input must be a string")
        messages = _turns("instruction", f"{question}\n\n{more}" if more else question, "user")
        messages += _turns("output", row["output"], "assistant")
    else:
        raise ValueError(
            f"no known form: its keys are {', '.join(row) or 'none'}; needed are messages, or prompt and completion, "
            "or instruction and output"
        )
    _check_turns("the conversation", messages)
    return {"messages": messages}


def dpo_example(row: Mapping[str, Any]) -> Example:
    """Bring a row into the shape of a DPO example (without `id`).

    Raises:
        ValueError: it is of no known form; says why.
    """
    missing = [key for key in ("prompt", "chosen", "rejected") if key not in row]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}; its keys are {', '.join(row) or 'none'}")
    prompt = _turns("prompt", row["prompt"], "user")
    answers = {key: _answer(key, row[key], prompt) for key in ("chosen", "rejected")}
    for answer in answers.values():
        _check_turns("the conversation", prompt + answer)
    if answers["chosen"] == answers["rejected"]:
        raise ValueError("chosen and rejected are the same")
    return {"prompt": prompt, **answers}


_FORMS: dict[str, Callable[[Mapping[str, Any]], Example]] = {"sft": sft_example, "dpo": dpo_example}


def _answer(key: str, value: Any, prompt: list[Message]) -> list[Message]:
    turns = _turns(key, value, "assistant")
    if turns[: len(prompt)] == prompt:
        turns = turns[len(prompt) :]
    if not turns:
        raise ValueError(f"{key} holds nothing but the prompt")
    return turns


def _turns(key: str, value: Any, role: str) -> list[Message]:
    if isinstance(value, list):
        return _messages(key, value)
    return [{"role": role, "content": _string(key, value)}]


def _messages(key: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} must be a list of messages")
    messages = []
    for number, message in enumerate(value, start=1):
        where = f"{key}, message {number}"
        if not isinstance(message, dict):
            raise ValueError(f"{where}: must be an object with role and content")
        if message.get("role") not in ROLES:
            raise ValueError(f"{where}: role {message.get('role')!r} is none of {', '.join(ROLES)}")
        messages.append({"role": message["role"], "content": _string(f"{where}: content", message.get("content"))})
    return messages


def _string(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string")
    if not value.strip():
        raise ValueError(f"{key} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{key} has a lone surrogate, which UTF-8 cannot hold") from error
    return value


def _check_turns(what: str, messages: list[Message]) -> None:
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{what} must end with the assistant, not with the {messages[-1]['role']}")
    if any(message["role"] == "system" for message in messages[1:]):
        raise ValueError(f"{what} may have a system message only at its beginning")
