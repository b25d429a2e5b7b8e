"""Stage `judge`: a language model scores documents, and thresholds drop some.

One process asks about the documents in the order of the shards, many at a time. A shard
is written when all its answers are there, and later attempts skip it; answers of
unfinished shards are stored (`answer_store.py`).

Memory: the texts of the shards in progress; with prompts of 8,000 characters, 16 at a
time, 2 MB and a shard or two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.files import canonical_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import Inputs, as_numbers
from gristmill.dataprep.llm.batch_requests import (
    ShardPrompts,
    ask_tasks,
    count_judged,
)
from gristmill.dataprep.llm.prompt_templates import PromptTemplate, question_template
from gristmill.dataprep.llm.prompting import Answer, Request
from gristmill.dataprep.llm.request_counts import RequestCounts
from gristmill.dataprep.runners.tasks import Done, ShardTask, shard_tasks
from gristmill.dataprep.thresholds import (
    MeasuredShard,
    MeasuredSummary,
    failures,
    first_failures,
    measured_shard,
    summarize,
)
from gristmill.dataprep.user_code.own_documents import read_judged_columns
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.judge import PREFIX, Judge, Question

READS = ("id", "text", "source", "locator", "url", "metadata")
GIVEN = (*READS[1:], "answer_schema")
"""Names that templates may use."""
JOB = "judge"
ARROW = {
    "number": pa.float64(),
    "integer": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "array": pa.string(),
}


@dataclass(frozen=True)
class JudgeSummary(MeasuredSummary):
    """Summary of the answers.

    Attributes:
        asked: requests and costs; empty if all answers were received before.
        unusable: documents without a usable answer.
    """

    asked: Sequence[RequestCounts]
    unusable: int


class JudgedShard(MeasuredShard):
    """Result of judging a shard."""

    unusable: int


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> JudgeSummary:
    """Ask a judge about every kept document, and drop documents by the thresholds.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `judge` section.

    Raises:
        AskingError: answers are unavailable, or the budget is spent; all answers
            received are stored.
        TemplateProblemError: the template cannot be used.
        ConservationError, QuarantineError: see `counts`.
    """
    section = Judge.model_validate(config)
    template = question_template(section)
    template.check(GIVEN)
    results, tallies = ask_tasks(
        JOB,
        shard_tasks(inputs["ingest"]),
        section.model,
        partial(read_prompts, inputs, section, template, section.sources),
        partial(_write, section, out),
        context,
        partial(count_judged, inputs, section.sources),
    )
    unusable = sum(result["unusable"] for result in results)
    if unusable and section.unusable == "pass":
        context.warn(
            f"{unusable:,} documents have no usable answer, and pass (`unusable: pass`)"
        )
    measured = summarize(results, section.max_quarantined, context.stage, out)
    return JudgeSummary(**vars(measured), asked=tallies, unusable=unusable)


def read_prompts(
    inputs: Inputs,
    question: Question,
    template: PromptTemplate,
    sources: Sequence[str] | None,
    shard: str,
    rows: np.ndarray | None = None,
) -> ShardPrompts:
    """Fill in the template for the kept documents of a shard: all, or those of
    `rows`.
    """
    read = read_judged_columns(inputs, shard, sources, READS)
    if rows is not None:
        is_chosen = np.isin(read.judged, rows)
        read = replace(
            read,
            judged=read.judged[is_chosen],
            given=read.given.filter(is_chosen),
        )
    answer_schema = canonical_json(question.answer).decode()
    prompts: list[Request | str] = []
    for values in read.given.select(READS).to_pylist():
        document = values.pop("id")
        template_values = {
            **values,
            "text": values["text"][: question.characters],
            "metadata": json.loads(values["metadata"]),
            "answer_schema": answer_schema,
        }
        prompts.append(
            template.request(
                template_values,
                question.answer,
                about=document,
                pattern=question.pattern,
            )
        )
    return ShardPrompts(read, prompts)


def _write(
    section: Judge,
    out: Path,
    task: ShardTask,
    shard_prompts: ShardPrompts,
    answers: Sequence[Answer],
) -> Done[JudgedShard]:
    problems = [answer.error for answer in answers]
    columns = {
        PREFIX + name: column_of(answers, name, property_schema["type"])
        for name, property_schema in section.answer["properties"].items()
    }
    numbers = {name: as_numbers(columns[name]) for name in section.numeric}
    errors = problems if section.unusable == "quarantine" else [None] * len(problems)
    usable = np.array([error is None for error in errors], bool)
    failed = {
        rule: mask & usable
        for rule, mask in failures(numbers, {"judge": section}).items()
    }
    reasons = first_failures(failed, len(errors))
    read = shard_prompts.read
    counts = read.write(out / task.name, reasons, columns, errors)
    unusable = len(problems) - problems.count(None)
    return Done(
        [out / task.name],
        {**measured_shard(counts, failed, numbers), "unusable": unusable},
    )


def column_of(answers: Sequence[Answer], name: str, kind: str) -> pa.Array:
    """Column of a property; null if it is absent or the answer is unusable."""
    values = [
        answer.value.get(name)
        if answer.error is None and answer.value is not None
        else None
        for answer in answers
    ]
    if kind in ("number", "integer"):
        values = [None if value is None else float(value) for value in values]
    if kind == "array":
        values = [
            None if value is None else ",".join(map(str, value)) for value in values
        ]
    return pa.array(values, ARROW[kind])
