"""`gristmill generate`: answers to the prompts of a JSONL file, as many at a time as fit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.mixtures.yaml_text import why_unreadable
from gristmill.train.data.conversation_tokens import ChatError
from gristmill.train.generation.language_model import LanguageModel, TextStream
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import PromptTooLongError, Request, Scheduler


class PromptsError(ValueError):
    """A line of a file is not a prompt."""


@dataclass(frozen=True)
class Generated:
    """What came of a file.

    Attributes:
        lines: one per prompt, in order: its fields, and `completion`, `finish_reason`, `completion_tokens`, or `error`
            where it could not be completed.
        failed: such prompts' numbers in the file and why.
        tokens: ids in all completions.
        seconds: that it took.
    """

    lines: list[dict[str, Any]]
    failed: dict[int, str]
    tokens: int
    seconds: float


def read_prompts(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of a JSONL file by their numbers from 1, without empty ones.

    Each has `prompt` (a text to continue) or `messages` (a conversation to answer).

    Raises:
        PromptsError: the file cannot be read, or a line is something else, with its number.
    """
    found = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path}: {why_unreadable(error)}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise PromptsError(f"{path}, line {number}: not JSON: {error}") from error
        keys = {"prompt", "messages"} & set(value) if isinstance(value, dict) else set()
        if len(keys) != 1:
            raise PromptsError(f"{path}, line {number}: needs either `prompt` (text) or `messages` (a list)")
        check_prompt(value, f"{path}, line {number}")
        found[number] = value
    if not found:
        raise PromptsError(f"{path} has no lines; each must be an object with `prompt` or `messages`")
    return found


def check_prompt(value: Mapping[str, Any], where: str) -> None:
    """Raise PromptsError unless the prompt is text, or the messages have a role and a content."""
    if isinstance(value.get("prompt"), str):
        return
    messages = value.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(
            isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))
            for one in messages
        )
    ):
        raise PromptsError(
            f"{where}: `prompt` must be text, `messages` a list of objects with the texts `role` and `content`"
        )


def generate_lines(
    language: LanguageModel,
    scheduler: Scheduler,
    prompts: Mapping[int, Mapping[str, Any]],
    sampling: Sampling,
    max_new_tokens: int,
    stops: Sequence[str] = (),
) -> Generated:
    """Complete prompts together.

    Args:
        language: the model with its tokenizer.
        scheduler: of that model, idle.
        prompts: by their numbers, each with `prompt` or `messages`, and perhaps more. One that is too long, or whose
            conversation the chat template refuses, is an error of that prompt alone.
        sampling: how ids are chosen; with its prompt the seed decides what a line gets.
        max_new_tokens: most ids of a completion.
        stops: texts that end one.
    """
    started = time.perf_counter()
    running = {place: _Line(language, prompt, stops) for place, prompt in prompts.items()}
    numbers: dict[int, _Line] = {}
    for place, prompt in prompts.items():
        try:
            ids = (
                language.chat_prompt(prompt["messages"])
                if "messages" in prompt
                else language.text_prompt(prompt["prompt"])
            )
            numbers[scheduler.add(Request(ids, max_new_tokens, language.stops, sampling))] = running[place]
        except (PromptTooLongError, ChatError) as error:
            running[place].error = str(error)
    while not scheduler.is_idle:
        for one in scheduler.step():
            line = numbers[one.number]
            if line.push(one.tokens, one.finish) and one.finish is None:
                scheduler.cancel(one.number)
    lines = running.values()
    return Generated(
        [line.result for line in lines],
        {place: line.error for place, line in running.items() if line.error is not None},
        sum(line.tokens for line in lines),
        time.perf_counter() - started,
    )


class _Line:
    def __init__(self, language: LanguageModel, prompt: Mapping[str, Any], stops: Sequence[str]) -> None:
        self._stream, self._prompt, self.tokens = TextStream(language.decode, stops), prompt, 0
        self._text: list[str] = []
        self._finish: str | None = None
        self.error: str | None = None

    def push(self, tokens: list[int], finish: str | None) -> bool:
        """Take some ids; whether the completion has ended."""
        self.tokens += len(tokens)
        self._text.append(self._stream.push(tokens))
        if finish is not None:
            self._text.append(self._stream.finish())
        self._finish = "stop" if self._stream.is_stopped else finish
        return self._finish is not None

    @property
    def result(self) -> dict[str, Any]:
        if self.error is not None:
            return {**self._prompt, "error": self.error}
        return {
            **self._prompt,
            "completion": "".join(self._text),
            "finish_reason": self._finish,
            "completion_tokens": self.tokens,
        }


def as_jsonl(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of JSON, ended by line feeds."""
    return (json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
