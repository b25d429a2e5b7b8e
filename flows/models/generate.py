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


@dataclass
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
    text: str = ""
    finish_reason: str | None = None
    num_tokens: int = 0
    error: str | None = None


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
        lines = path.read_text(encoding="utf-8").split("\n")
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
        if not _is_prompt(prompt):
            raise PromptsError(
                f"{path}, line {number}: needs either `prompt` (text) or `messages` (a "
                "list of objects with the texts `role` and `content`)"
            )
        prompts[number] = prompt
    if not prompts:
        raise PromptsError(
            f"{path} has no lines; each must be an object with `prompt` or `messages`"
        )
    return prompts


def _is_prompt(line: Any) -> bool:
    if not isinstance(line, dict):
        return False
    if "prompt" in line:
        return "messages" not in line and isinstance(line["prompt"], str)
    messages = line.get("messages")
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
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
    completions = []
    failed = {}
    by_request: dict[int, tuple[Completion, TextStream]] = {}
    for place, prompt in prompts.items():
        completion = Completion(prompt)
        completions.append(completion)
        try:
            if "messages" in prompt:
                ids = language.chat_prompt(prompt["messages"])
            else:
                ids = language.text_prompt(prompt["prompt"])
            request = scheduler.add(
                Request(ids, max_new_tokens, language.stops, sampling)
            )
            by_request[request] = completion, TextStream(language.decode, stops)
        except (PromptTooLongError, ChatError) as error:
            completion.error = failed[place] = str(error)
    while not scheduler.is_idle:
        for progress in scheduler.step():
            completion, stream = by_request[progress.number]
            completion.num_tokens += len(progress.tokens)
            completion.text += stream.push(progress.tokens)
            if progress.finish is not None:
                completion.text += stream.finish()
            completion.finish_reason = "stop" if stream.is_stopped else progress.finish
            if stream.is_stopped and progress.finish is None:
                scheduler.cancel(progress.number)
    return Generated(
        completions,
        failed,
        sum(completion.num_tokens for completion in completions),
        time.perf_counter() - started,
    )


def as_jsonl(completions: Sequence[Completion]) -> str:
    """Lines of JSON, each with a line feed: the fields of the prompt, and `completion`,
    `finish_reason` and `completion_tokens`, or `error`.
    """
    lines = ""
    for completion in completions:
        line: dict[str, object] = {**completion.prompt, "error": completion.error}
        if completion.error is None:
            line = {
                **completion.prompt,
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "completion_tokens": completion.num_tokens,
            }
        lines += json.dumps(line, ensure_ascii=False) + "\n"
    return lines
