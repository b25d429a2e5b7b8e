"""Suites of tasks by name: accuracy per task, centred between chance and 1, and their
mean with its interval.

Questions and scoring follow nanochat's CORE (github.com/karpathy/nanochat,
nanochat/core_eval.py), so scores are comparable: items shuffled with seed 1337, shots
drawn for each item with the seed 1234 + its number, and a beginning-of-text token
before every row. `suites.yaml` has the tasks and the published scores.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import TypeAdapter

from gristmill.core.files import as_path
from gristmill.core.seeds import seeded_key
from gristmill.dataprep.decontamination.evaluation_sets import read_items
from gristmill.mixtures.schema.evaluation import Evaluate, Suite
from gristmill.train.eval.intervals import (
    Estimate,
    percentiles,
    resampled_means,
)
from gristmill.train.eval.likelihood import Request
from gristmill.train.eval.task_files import Record, TaskError
from gristmill.train.generation.language_model import Encode, LanguageModel
from gristmill.train.loop.batch_plan import slices

ORDER_SEED, SHOTS_SEED = 1337, 1234
"""Seeds of nanochat."""
ITEMS_AT_A_TIME = 256
"""Items whose rows of tokens are in memory together."""
Kind = Literal["multiple_choice", "schema", "language_modeling"]
FIELDS: Mapping[Kind, tuple[str, ...]] = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


@dataclass(frozen=True)
class SuiteTask:
    """A task of a suite.

    Attributes:
        name: in the results.
        file: relative to the suite's folder.
        kind: `multiple_choice`: the choice whose own tokens are likeliest in the mean;
            `schema`: the context that makes the continuation likeliest;
            `language_modeling`: whether every token of the continuation is the
            likeliest.
        shots: solved items before each item.
        baseline: accuracy of chance, in percent.
        delimiter: between an item and its answer.
    """

    name: str
    file: str
    kind: Kind
    shots: int
    baseline: float
    delimiter: str = " "


@dataclass(frozen=True)
class Reference:
    """A published score of another model, with its source."""

    model: str
    score: float
    source: str


@dataclass(frozen=True)
class KnownSuite:
    """A suite of `suites.yaml`."""

    title: str
    tasks: tuple[SuiteTask, ...]
    references: tuple[Reference, ...]


@dataclass(frozen=True)
class SuiteTaskResult:
    """Result of a model on a task of a suite.

    Attributes:
        items: number of items.
        shots: solved items before each.
        baseline: accuracy of chance.
        accuracy: share of right answers.
        centred: accuracy between chance (0) and 1.
    """

    items: int
    shots: int
    baseline: float
    accuracy: Estimate
    centred: Estimate


@dataclass(frozen=True)
class SuiteResult:
    """Result of a model on a suite.

    Attributes:
        title: of the suite.
        limit: most items per task; None if all are asked.
        tasks: results by task.
        score: mean of the centred accuracies, with its interval from resampling each
            task's items.
        references: published scores of other models.
    """

    title: str
    limit: int | None
    tasks: Mapping[str, SuiteTaskResult]
    score: Estimate
    references: Sequence[Reference]


@cache
def known_suites() -> Mapping[str, KnownSuite]:
    """All suites by name."""
    return TypeAdapter(dict[str, KnownSuite]).validate_python(
        yaml.safe_load(
            Path(__file__).with_name("suites.yaml").read_text(encoding="utf-8")
        )
    )


def centred(accuracy: Any, baseline: float) -> Any:
    """Accuracy, or an array of them, rescaled from 0 (chance, `baseline` percent) to 1
    (Li et al. 2024).
    """
    return (accuracy - 0.01 * baseline) / (1.0 - 0.01 * baseline)


def read_suite(section: Suite) -> dict[str, list[Record]]:
    """Items by task, in order.

    Raises:
        TaskError: files are missing (all are listed), or an item lacks a field.
    """
    folder = as_path(section.path)
    tasks = known_suites()[section.suite].tasks
    if missing := [task.file for task in tasks if not (folder / task.file).exists()]:
        raise TaskError(
            f"suite {section.suite}: {section.path} lacks "
            f"{', '.join(sorted(set(missing)))}; docs/suites.md says where they are from"
        )
    suite = {}
    for task in tasks:
        place = folder / task.file
        items = list(read_items(task.file, place))
        for number, item in enumerate(items, start=1):
            if missing := [name for name in FIELDS[task.kind] if name not in item]:
                raise TaskError(
                    f"suite {section.suite}: {place}, item {number}: no field "
                    f"{missing[0]!r}; a task of kind "
                    f"{task.kind} has {', '.join(FIELDS[task.kind])}"
                )
        random.Random(ORDER_SEED).shuffle(items)
        suite[task.name] = items[: section.limit]
        if len(suite[task.name]) <= task.shots:
            raise TaskError(
                f"suite {section.suite}: {task.name} has {len(suite[task.name])} items "
                f"to ask, too few for its {task.shots} solved ones before each"
            )
    return suite


def answer_suites(
    language: LanguageModel,
    section: Evaluate,
    asked: Mapping[str, Mapping[str, Sequence[Record]]],
) -> dict[str, dict[str, Any]]:
    """Results of a model by suite, as JSON."""
    seed, samples = section.key_seed, section.bootstrap_samples
    return {
        suite.suite: asdict(
            answer_suite(language, suite, asked[suite.suite], seed, samples)
        )
        for suite in section.suites
    }


def answer_suite(
    language: LanguageModel,
    section: Suite,
    asked: Mapping[str, Sequence[Record]],
    seed: int,
    bootstrap_samples: int,
) -> SuiteResult:
    """Evaluate one model on all tasks of a suite."""
    suite = known_suites()[section.suite]
    results = {}
    resampled = []
    for number, task in enumerate(suite.tasks):
        right = task_answers(language, task, asked[task.name])
        key = seeded_key(seed, section.suite, number)
        drawn = resampled_means(right[:, None], key, bootstrap_samples)[:, 0]
        resampled.append(centred(drawn, task.baseline))
        accuracy = float(right.mean())
        results[task.name] = SuiteTaskResult(
            items=len(right),
            shots=task.shots,
            baseline=task.baseline / 100,
            accuracy={"value": accuracy, **percentiles(drawn)},
            centred={
                "value": centred(accuracy, task.baseline),
                **percentiles(resampled[-1]),
            },
        )
    value = np.mean([result.centred["value"] for result in results.values()])
    return SuiteResult(
        title=suite.title,
        limit=section.limit,
        tasks=results,
        score={"value": float(value), **percentiles(np.mean(resampled, axis=0))},
        references=suite.references,
    )


def task_answers(
    language: LanguageModel, task: SuiteTask, items: Sequence[Record]
) -> np.ndarray:
    """Correctness of a model on items: (n,) float64, 1 if right."""
    is_right: list[float] = []
    for part in slices(len(items), ITEMS_AT_A_TIME):
        numbers = range(part.start, part.stop)
        rendered_items = [rendered(task, items, number) for number in numbers]
        requests = [
            requests_of(language.encode, language.start, task.kind, texts)
            for texts, _ in rendered_items
        ]
        scores = iter(
            language.score([request for of_item in requests for request in of_item])
        )
        for (_, right), item_requests in zip(rendered_items, requests, strict=True):
            item_scores = [next(scores) for _ in item_requests]
            if task.kind == "language_modeling":
                is_right.append(float(item_scores[0].greedy))
            else:
                means = [score.logp / max(score.tokens, 1) for score in item_scores]
                is_right.append(float(int(np.argmax(means)) == right))
    return np.array(is_right)


def rendered(
    task: SuiteTask, items: Sequence[Record], number: int
) -> tuple[list[str], int]:
    """Texts of an item after its shots, one per choice or context (for
    `language_modeling` the prompt alone, and with its continuation), and the index of
    the right one.
    """
    other_items = [place for place in range(len(items)) if place != number]
    solved = random.Random(SHOTS_SEED + number).sample(other_items, task.shots)
    shots = ""
    for place in solved:
        texts, right = _texts(task, items[place])
        shots += f"{texts[right]}\n\n"
    texts, right = _texts(task, items[number])
    texts = [shots + text for text in texts]
    if task.kind == "language_modeling":
        texts[0] = texts[0].strip()
    return texts, right


def _texts(task: SuiteTask, item: Record) -> tuple[list[str], int]:
    """Texts of an item, and the place of the solved one."""
    delimiter = task.delimiter
    if task.kind == "language_modeling":
        prompt = f"{str(item['context']).strip()}{delimiter}"
        return [prompt, prompt + item["continuation"]], 1
    pairs = (
        [(item["query"], choice) for choice in item["choices"]]
        if task.kind == "multiple_choice"
        else [(option, item["continuation"]) for option in item["context_options"]]
    )
    texts = [f"{question}{delimiter}{answer}" for question, answer in pairs]
    return texts, int(item["gold"])


def requests_of(
    encode: Encode, prefix: int, kind: Kind, texts: Sequence[str]
) -> list[Request]:
    """Requests that score an item: for choices the ids after their common prefix, for
    contexts their common suffix, for a continuation the ids after the prompt's.
    """
    rows = [(prefix, *encode(text)) for text in texts]
    if kind == "schema":
        num_common = _common([row[::-1] for row in rows])
        return [
            Request(row[: len(row) - num_common], row[len(row) - num_common :])
            for row in rows
        ]
    num_common = _common(
        rows if kind == "multiple_choice" else [(*rows[0], -1), rows[1]]
    )
    return [
        Request(row[:num_common], row[num_common:])
        for row in (rows[1:] if kind == "language_modeling" else rows)
    ]


def _common(rows: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix of all rows, shorter than the shortest row, so that
    an id of each row is scored.
    """
    limit = min(map(len, rows)) - 1
    return next(
        (place for place in range(limit) if len({row[place] for row in rows}) > 1),
        limit,
    )
