"""Evaluation of a model on tasks, with intervals."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from gristmill.mixtures.schema.evaluation import Evaluate, Task
from gristmill.train.data.conversation_tokens import Chat, ChatError
from gristmill.train.distributed.process_groups import World
from gristmill.train.eval.held_out import LARGEST_EXPONENT
from gristmill.train.eval.intervals import (
    Estimate,
    interval,
    mean_with_interval,
)
from gristmill.train.eval.likelihood import (
    Encode,
    Request,
    Score,
    continuation,
    score_requests,
    windows,
)
from gristmill.train.eval.metrics import (
    PerItem,
    bits_per_byte,
    choice_metrics,
    generation_metrics,
    own_metric,
)
from gristmill.train.eval.tasks import Item, TaskError, read_task
from gristmill.train.generation.scheduler import generate
from gristmill.train.loop.batch_plan import slices
from gristmill.train.models.transformer import Llama

PROMPTS_PER_BATCH = 16
SAMPLES = 5
"""Generated answers that a result has."""


@dataclass(frozen=True)
class Reader:
    """A model with its tokenizer, for evaluation.

    Attributes:
        model: complete in this process, or sharded over `world`.
        encode: text -> ids without special tokens.
        prompt: text to continue -> ids, with those that stood before a text in training
            unless it begins with them.
        decode: ids -> text without special tokens.
        prefix: id before a text without context: the tokenizer's start of text, or its
            end without one.
        stops: ids that end an answer.
        chat: the tokenizer's chat template; raises ChatError without one.
        world: processes of a sharded model, which can score but not generate.
    """

    model: Llama
    encode: Encode
    prompt: Encode
    decode: Callable[[Sequence[int]], str]
    prefix: int
    stops: frozenset[int]
    chat: Callable[[], Chat]
    world: World | None = None

    @property
    def length(self) -> int:
        """Most ids of a row."""
        return self.model.shape.sequence_length

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Log-likelihoods of requests; a collective call if the model is sharded."""
        return score_requests(
            self.model, requests, self.length, self.device, self.world
        )


@dataclass(frozen=True)
class AnswerSample:
    """End of a prompt, the model's answer, and a reference answer."""

    prompt: str
    answer: str
    reference: str


@dataclass(frozen=True)
class Result:
    """Results of a task.

    Attributes:
        items: number of items.
        metrics: by name.
        per_item: values for paired comparisons.
        tokens: of all texts, for `rolling`.
        samples: first answers, for `generate`.
    """

    items: int
    metrics: Mapping[str, Estimate]
    per_item: PerItem
    tokens: int | None = None
    samples: Sequence[AnswerSample] | None = None

    @property
    def summary(self) -> dict[str, object]:
        """Results as JSON, with the metrics beside the number of items."""
        summary: dict[str, object] = {"items": self.items, **self.metrics}
        if self.tokens is not None:
            summary["tokens"] = self.tokens
        if self.samples is not None:
            summary["samples"] = [asdict(sample) for sample in self.samples]
        return summary


def answer_task(
    reader: Reader, task: Task, items: Sequence[Item], seed: int, bootstrap_samples: int
) -> Result:
    """Evaluate one model on all items of a task."""
    if task.kind == "rolling":
        return _rolling(reader, items, seed, bootstrap_samples)
    if task.kind == "generate":
        return _generate(reader, task, items, seed, bootstrap_samples)
    is_choice = task.kind == "multiple_choice"
    delimiter = task.target_delimiter if is_choice and not task.chat_template else ""
    scores = reader.score(
        [
            continuation(
                reader.encode if task.chat_template else reader.prompt,
                reader.prefix,
                _context(reader, task, item),
                delimiter + answer,
            )
            for item in items
            for answer in (item.answers if is_choice else item.answers[:1])
        ]
    )
    if is_choice:
        remaining = iter(scores)
        answered = [[next(remaining) for _ in item.answers] for item in items]
        per_item = choice_metrics(items, answered)
        return Result(len(items), _means(per_item, seed, bootstrap_samples), per_item)
    logp = np.array([score.logp for score in scores])
    greedy = np.array([float(score.greedy) for score in scores])
    perplexity: Estimate = {
        "value": float(np.exp(-logp.mean())),
        **interval(
            logp[:, None], lambda means: np.exp(-means[:, 0]), seed, bootstrap_samples
        ),
    }
    accuracy = mean_with_interval(greedy, seed, bootstrap_samples)
    return Result(
        len(items),
        {"acc": accuracy, "perplexity": perplexity},
        {"acc": greedy, "logp": logp},
    )


def _context(reader: Reader, task: Task, item: Item) -> str:
    """Context of an item's answer, plain or rendered by the chat template."""
    if not task.chat_template:
        return item.context
    try:
        return reader.chat().text(item.messages, prompt=True)
    except ChatError as error:
        raise TaskError(f"task {task.name}, item {item.number}: {error}") from error


def _rolling(
    reader: Reader, items: Sequence[Item], seed: int, bootstrap_samples: int
) -> Result:
    texts = [item.answers[0] for item in items]
    # lm-evaluation-harness scores the start of text too, after itself.
    encoded = [reader.prompt(text) for text in texts]
    requests = [list(windows(ids, reader.prefix, reader.length)) for ids in encoded]
    scores = iter(reader.score([window for text in requests for window in text]))
    # Words as lm-evaluation-harness counts them: the parts between white space,
    # including empty ones at both ends.
    columns = np.array(
        [
            [
                sum(next(scores).logp for _ in text_windows),
                len(text.encode()),
                len(re.split(r"\s+", text)),
            ]
            for text, text_windows in zip(texts, requests, strict=True)
        ],
        dtype=np.float64,
    )
    sums = columns.sum(axis=0)
    nats, num_bytes, words = sums
    metrics: dict[str, Estimate] = {
        "bits_per_byte": {
            "value": float(bits_per_byte(sums)),
            **interval(columns, bits_per_byte, seed, bootstrap_samples),
        },
        "byte_perplexity": {"value": float(np.exp(-nats / num_bytes))},
    }
    if words and -nats / words < LARGEST_EXPONENT:
        metrics["word_perplexity"] = {"value": float(np.exp(-nats / words))}
    return Result(
        len(items),
        metrics,
        {"bits_per_byte": bits_per_byte(columns)},
        tokens=sum(map(len, encoded)),
    )


def _generate(
    reader: Reader, task: Task, items: Sequence[Item], seed: int, bootstrap_samples: int
) -> Result:
    room = reader.length - task.max_new_tokens
    if room < 1:
        raise ValueError(
            f"task {task.name}: max_new_tokens {task.max_new_tokens} leave no room for "
            f"a prompt in the model's {reader.length} tokens; lower it"
        )
    stops = reader.chat().stops if task.chat_template else reader.stops
    encode = reader.encode if task.chat_template else reader.prompt
    prompts = [
        (encode(_context(reader, task, item)) or [reader.prefix])[-room:]
        for item in items
    ]
    answers = [
        until(text, task.stop)
        for text in written(reader, prompts, task.max_new_tokens, stops)
    ]
    per_item = generation_metrics(task.built_in_metrics, items, answers)
    corpus_values: dict[str, float] = {}
    for metric in task.own_metrics:
        measured = own_metric(metric, items, answers)
        if isinstance(measured, float):
            corpus_values[metric.called] = measured
        else:
            per_item[metric.called] = measured
    metrics = _means(per_item, seed, bootstrap_samples)
    metrics |= {name: {"value": value} for name, value in corpus_values.items()}
    samples = [
        AnswerSample(item.context[-400:], answer, item.answers[0])
        for item, answer in zip(items[:SAMPLES], answers[:SAMPLES], strict=True)
    ]
    return Result(len(items), metrics, per_item, samples=samples)


def written(
    reader: Reader,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stops: Collection[int],
) -> list[str]:
    """Likeliest completions of prompts, batched by length; arguments as for
    `generate`.
    """
    texts = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for part in slices(len(order), PROMPTS_PER_BATCH):
        batch = order[part]
        completions = generate(
            reader.model,
            [prompts[number] for number in batch],
            max_new_tokens,
            stops,
        )
        for number, ids in zip(batch, completions, strict=True):
            texts[number] = reader.decode(ids)
    return texts


def until(text: str, stops: Sequence[str]) -> str:
    """A text up to the first occurrence of a stop string."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _means(per_item: PerItem, seed: int, bootstrap_samples: int) -> dict[str, Estimate]:
    return {
        name: mean_with_interval(values, seed, bootstrap_samples)
        for name, values in per_item.items()
    }


def open_reader(
    model: Llama, tokenizer_folder: Path, world: World | None = None
) -> Reader:
    """Reader for a model, sharded or not, with the tokenizer of a folder (of the stage
    tokenizer, or of an export).
    """
    from gristmill.tokenize.encoding.tokenizer import (
        configured_tokens,
        load,
        read_prompt_tokenizer,
    )

    text = load(tokenizer_folder)
    tokenizer = read_prompt_tokenizer(tokenizer_folder, model.shape.follows_end)
    start = tokenizer.decode(tokenizer.encode("").ids, skip_special_tokens=False)
    bos = configured_tokens(tokenizer_folder).get("bos_token", "")

    def encode(string: str) -> list[int]:
        return tokenizer.encode(string, add_special_tokens=False).ids

    def prompt(string: str) -> list[int]:
        is_begun = string.startswith(start)
        return tokenizer.encode(string, add_special_tokens=not is_begun).ids

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    return Reader(
        model,
        encode,
        prompt,
        decode,
        text.special_ids.get(bos, text.eos),
        frozenset({text.eos}),
        cache(lambda: Chat(tokenizer_folder)),
        world,
    )


def answer_tasks(
    reader: Reader, section: Evaluate, task_items: Mapping[str, Sequence[Item]]
) -> dict[str, Result]:
    """Results by task."""
    return {
        task.name: answer_task(
            reader,
            task,
            task_items[task.name],
            section.key_seed,
            section.bootstrap_samples,
        )
        for task in section.tasks
    }


class InLoopTasks:
    """Tasks evaluated during a training; called on every rank together.

    Args:
        tasks: tasks, read once.
        reader: the model in training.
        every: steps between evaluations; the last step is always included.
        last: the last step.
    """

    def __init__(
        self, tasks: Sequence[Task], reader: Reader, every: int, last: int
    ) -> None:
        self._reader = reader
        self._every = every
        self._last = last
        self._task_items = [(task, read_task(task)) for task in tasks]

    def __call__(self, step: int) -> dict[str, dict[str, dict[str, float]]] | None:
        """`tasks`: task -> metric -> value; None at other steps and without tasks."""
        if not self._task_items or (step != self._last and step % self._every):
            return None
        values = {}
        for task, items in self._task_items:
            metrics = answer_task(self._reader, task, items, 0, 1).metrics
            values[task.name] = {
                name: estimate["value"] for name, estimate in metrics.items()
            }
        return {"tasks": values}
