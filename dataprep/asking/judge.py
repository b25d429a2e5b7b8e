"""The stage `judge`: a language model scores documents, and thresholds decide.

Documents are asked about in the order of the shards by one process, many at a time; a shard whose answers are all there
is written, and not looked at again by a later attempt. What was answered of the others is kept (`answer_store.py`).

Memory: the texts of the shards that are on their way; with requests of 8,000 characters, 16 at a time, 2 MB and a shard
or two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep import counts as histograms
from gristmill.dataprep.asking.agreement import agreement, count_pairs
from gristmill.dataprep.asking.prompt_templates import PromptTemplate, read_template
from gristmill.dataprep.asking.prompting import Answer, Request
from gristmill.dataprep.asking.shard_answers import ShardPrompts, ask_tasks, count_judged, with_problems
from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, balance
from gristmill.dataprep.documents import annotate, write_table
from gristmill.dataprep.files import canonical_json
from gristmill.dataprep.jobs.engine import Done, Task, shard_tasks
from gristmill.dataprep.own.own_documents import read_judged_columns
from gristmill.dataprep.thresholds import count_failures, failures, first_failures
from gristmill.mixtures.steps.judge import FIRST, SECOND, Judge, Question

READS = ("id", "text", "source", "locator", "url", "metadata")
GIVEN = (*READS[1:], "answer_schema")
"""What templates get."""
JOB = "judge"
ARROW = {"number": pa.float64(), "integer": pa.float64(), "boolean": pa.bool_(), "string": pa.string()}


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Ask one or two judges about every kept document, and drop what the thresholds say.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `judge` section.

    Returns:
        `counts`, `rules` and `histograms` as of `annotate`; `asked`: per judge what asking came to; `unusable`:
        documents without a usable answer; with two judges `agreement` of each score.

    Raises:
        AskingError: answers cannot be had, or the budget is spent; all that were given are kept.
        TemplateProblemError: the template cannot be used.
        ConservationError, QuarantineError: see `counts`.
    """
    section = Judge.model_validate(config)
    template = read_template(section.template, f"judge-{section.rubric}")
    template.check(GIVEN)
    results, asked = ask_tasks(
        JOB,
        shard_tasks(inputs["ingest"]),
        section.models,
        partial(read_prompts, dict(inputs), section, template, section.sources),
        partial(_write, section, out),
        context,
        partial(count_judged, inputs, section.sources),
    )
    unusable = sum(result["unusable"] for result in results)
    if unusable and section.unusable == "pass":
        context.warn(f"{unusable:,} documents have no usable answer, and pass (`unusable: pass`)")
    found = (
        {}
        if section.second is None
        else {
            "agreement": {
                name: agreement(add_counts(result["agreement"][name] for result in results)) for name in section.scores
            }
        }
    )
    return {
        "counts": balance(results, section.max_quarantined, context.stage, errors=out),
        "rules": add_counts(result["rules"] for result in results),
        "histograms": {
            name: histograms.fit_histogram(counted)
            for name, counted in histograms.add_histograms(result["histograms"] for result in results).items()
        },
        "asked": asked,
        "unusable": unusable,
        **found,
    }


def read_prompts(
    inputs: Mapping[str, Path],
    question: Question,
    template: PromptTemplate,
    sources: Sequence[str] | None,
    shard: str,
    rows: np.ndarray | None = None,
) -> ShardPrompts:
    """Fill the template in for the documents of a shard that were kept so far: all, or those of some rows."""
    read = read_judged_columns(inputs, shard, sources, READS)
    if rows is not None:
        chosen = np.isin(read.judged, rows)
        read = replace(read, judged=read.judged[chosen], given=read.given.filter(pa.array(chosen)))
    answer_schema = canonical_json(question.answer).decode()
    found: list[Request | str] = []
    for values in read.given.select(READS).to_pylist():
        document = values.pop("id")
        given = {
            **values,
            "text": values["text"][: question.characters],
            "metadata": json.loads(values["metadata"]),
            "answer_schema": answer_schema,
        }
        found.append(template.request(given, question.answer, about=document))
    return ShardPrompts(read, found)


def _write(section: Judge, out: Path, task: Task, of_shard: ShardPrompts, given: Sequence[Sequence[Answer]]) -> Done:
    answers = [with_problems(of_shard.prompts, found) for found in given]
    problems = [
        next((one.error for one in of_document if one.error is not None), None)
        for of_document in zip(*answers, strict=True)
    ]
    columns = {
        prefix + name: column_of(found, name, of["type"])
        for prefix, found in zip(section.prefixes, answers, strict=True)
        for name, of in section.answer["properties"].items()
    }
    numbers = {name: as_numbers(columns[name]) for name in section.numeric}
    errors = problems if section.unusable == "quarantine" else [None] * len(problems)
    usable = np.array([error is None for error in errors], bool)
    failed = {rule: mask & usable for rule, mask in failures(numbers, {"judge": section}).items()}
    reasons = first_failures(failed, len(errors))
    read = of_shard.read
    table, counts = annotate(read.documents, read.rows, read.judged, reasons, columns, errors)
    write_table(out / task.name, table)
    both = (
        {}
        if section.second is None
        else {
            "agreement": {name: count_pairs(numbers[FIRST + name], numbers[SECOND + name]) for name in section.scores}
        }
    )
    return Done(
        [out / task.name],
        {
            "counts": counts,
            "rules": count_failures(failed),
            "unusable": sum(one is not None for one in problems),
            "histograms": {
                name: histograms.histogram(values, histograms.ANY_EDGES) for name, values in numbers.items()
            },
            **both,
        },
    )


def column_of(answers: Sequence[Answer], name: str, kind: str) -> pa.Array:
    """A property of all answers; null where it is absent or the answer cannot be used."""
    values = [
        answer.value.get(name) if answer.error is None and answer.value is not None else None for answer in answers
    ]
    if kind in ("number", "integer"):
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, ARROW[kind])


def as_numbers(values: pa.Array) -> np.ndarray:
    """Float64, NaN for null; true is 1."""
    return np.array([math.nan if value is None else float(value) for value in values.to_pylist()], np.float64)
