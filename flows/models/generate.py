"""`gristmill generate`: answers to the prompts of a JSONL file, generated in
batches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from gristmill.dataprep.examples.conversations import Message
from gristmill.mixtures.yaml_text import why_unreadable
from gristmill.train.data.conversation_tokens import ChatError
from gristmill.train.generation.language_model import LanguageModel, TextStream
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import PromptTooLongError, Request, Scheduler


class PromptsError(ValueError):
    """A line of a file is not a prompt."""


class Prompt(TypedDict, total=False):
    """A line of a file of prompts: a text to continue, or a conversation to answer. It
    may have other fields.
    """

    prompt: str
    messages: list[Message]


@dataclass(frozen=True)
class Completion:
    """Completion of a prompt.

    Attributes:
        prompt: line of the file.
        text: the completion.
        finish_reason: `stop`, or `length` if it was cut.
        num_tokens: number of its ids.
        error: reason if the prompt could not be completed.
    """

    prompt: Prompt
    text: str
    finish_reason: str | None
    num_tokens: int
    error: str | None


@dataclass(frozen=True)
class Generated:
    """Completions of the prompts of a file.

    Attributes:
        completions: one per prompt, in order.
        failed: line numbers of the prompts that could not be completed, and the
            reasons.
        tokens: ids in all completions.
        seconds: duration.
    """

    completions: list[Completion]
    failed: dict[int, str]
    tokens: int
    seconds: float


def read_prompts(path: Path) -> dict[int, Prompt]:
    """The lines of a JSONL file by their numbers from 1, without empty ones.

    Raises:
        PromptsError: the file cannot be read, or a line is not a prompt; the message
            has the line's number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path}: {why_unreadable(error)}") from error
    prompts: dict[int, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError as error:
            raise PromptsError(f"{path}, line {number}: not JSON: {error}") from error
        _check_prompt(prompt, f"{path}, line {number}")
        prompts[number] = prompt
    if not prompts:
        raise PromptsError(
            f"{path} has no lines; each must be an object with `prompt` or `messages`"
        )
    return prompts


def _check_prompt(prompt: Any, where: str) -> None:
    if not isinstance(prompt, dict) or ("prompt" in prompt) == ("messages" in prompt):
        raise PromptsError(
            f"{where}: needs either `prompt` (text) or `messages` (a list)"
        )
    if isinstance(prompt.get("prompt"), str):
        return
    messages = prompt.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(map(_is_message, messages))
    ):
        raise PromptsError(
            f"{where}: `prompt` must be text, `messages` a list of objects with the "
            "texts `role` and `content`"
        )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def generate_lines(
    language: LanguageModel,
    scheduler: Scheduler,
    prompts: Mapping[int, Prompt],
    sampling: Sampling,
    max_new_tokens: int,
    stops: Sequence[str] = (),
) -> Generated:
    """Complete prompts together.

    Args:
        language: the model with its tokenizer.
        scheduler: of that model, idle.
        prompts: by their numbers. A prompt that is too long, or that the chat template
            refuses, is an error of that prompt alone.
        sampling: a line's completion depends on the seed and its prompt.
        max_new_tokens: most ids of a completion.
        stops: texts that end a completion.
    """
    started = time.perf_counter()
    completions = {
        place: _PendingCompletion(language, prompt, stops)
        for place, prompt in prompts.items()
    }
    by_request: dict[int, _PendingCompletion] = {}
    for place, prompt in prompts.items():
        try:
            if "messages" in prompt:
                ids = language.chat_prompt(prompt["messages"])
            else:
                ids = language.text_prompt(prompt["prompt"])
            request = scheduler.add(
                Request(ids, max_new_tokens, language.stops, sampling)
            )
            by_request[request] = completions[place]
        except (PromptTooLongError, ChatError) as error:
            completions[place].error = str(error)
    while not scheduler.is_idle:
        for progress in scheduler.step():
            has_ended = by_request[progress.number].push(
                progress.tokens, progress.finish
            )
            if has_ended and progress.finish is None:
                scheduler.cancel(progress.number)
    return Generated(
        [completion.result for completion in completions.values()],
        {
            place: completion.error
            for place, completion in completions.items()
            if completion.error is not None
        },
        sum(completion.num_tokens for completion in completions.values()),
        time.perf_counter() - started,
    )


class _PendingCompletion:
    def __init__(
        self, language: LanguageModel, prompt: Prompt, stops: Sequence[str]
    ) -> None:
        self._prompt = prompt
        self._stream = TextStream(language.decode, stops)
        self._pieces: list[str] = []
        self._finish: str | None = None
        self.num_tokens = 0
        self.error: str | None = None

    def push(self, ids: list[int], finish: str | None) -> bool:
        """Add ids; True if the completion has ended."""
        self.num_tokens += len(ids)
        self._pieces.append(self._stream.push(ids))
        if finish is not None:
            self._pieces.append(self._stream.finish())
        self._finish = "stop" if self._stream.is_stopped else finish
        return self._finish is not None

    @property
    def result(self) -> Completion:
        """The completion so far."""
        return Completion(
            self._prompt,
            "".join(self._pieces),
            self._finish,
            self.num_tokens,
            self.error,
        )


def as_jsonl(completions: Sequence[Completion]) -> str:
    """Lines of JSON, each with a line feed: the fields of the prompt, and `completion`,
    `finish_reason` and `completion_tokens`, or `error`.
    """
    lines = []
    for completion in completions:
        added: dict[str, object] = {"error": completion.error}
        if completion.error is None:
            added = {
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "completion_tokens": completion.num_tokens,
            }
        line = {**completion.prompt, **added}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)
