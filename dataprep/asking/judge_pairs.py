"""The step `judge_pairs`: a language model compares the answers of pairs, each pair in both orders.

A judge prefers an answer if it takes it in both orders; a pair of which it takes what stands first, or second, each
time is undecided (Zheng et al. 2023, "Judging LLM-as-a-Judge", section 3.4). The texts of the documents are pairs as
JSON (`pair_text`). Memory: the pairs of the shards that are on their way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.asking.agreement import agreement, count_pairs
from gristmill.dataprep.asking.prompt_templates import PromptTemplate, read_lines, shipped
from gristmill.dataprep.asking.prompt_templates import read_template as read_template_file
from gristmill.dataprep.asking.prompting import Answer, Request
from gristmill.dataprep.asking.shard_answers import ShardPrompts, ask_tasks, count_judged, with_problems
from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, balance
from gristmill.dataprep.documents import annotate, write_table
from gristmill.dataprep.files import canonical_json
from gristmill.dataprep.jobs.engine import Done, Task, shard_tasks
from gristmill.dataprep.own.own_documents import read_judged_columns
from gristmill.dataprep.seeds import seeded_key
from gristmill.mixtures.steps.judge import FIRST, SECOND
from gristmill.mixtures.steps.judge_pairs import REJECTED, UNDECIDED, Comparison, JudgePairs

QUESTION = "compare-pairs"
GIVEN = ("prompt", "first", "second", "principle", "source", "answer_schema")
"""What templates get."""
ANSWER: Mapping[str, Any] = {
    "type": "object",
    "properties": {"better": {"enum": ["first", "second", "same"]}, "reason": {"type": "string"}},
    "required": ["better"],
}
CHOSEN = "chosen"
RULE = "judge_pairs"
JOB = "judge_pairs"


def pair_text(prompt_text: str, chosen: str, rejected: str) -> str:
    """A pair as the text of a document."""
    return json.dumps({"prompt": prompt_text, CHOSEN: chosen, REJECTED: rejected}, ensure_ascii=False)


def read_question(section: Comparison) -> PromptTemplate:
    """What a judge is asked.

    Raises:
        TemplateProblemError: it cannot be read, or asks for what it is not given.
    """
    template = shipped(QUESTION) if section.template is None else read_template_file(section.template, QUESTION)
    template.check(GIVEN)
    return template


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Ask one or two judges about every kept pair, and drop those that the first one does not confirm.

    Args:
        inputs: `ingest`, with pairs as texts, and the annotating stages that ran before.
        config: the section `judge_pairs`.

    Returns:
        `counts`; `asked`; `unusable`; `biases`: per judge what `biases_of` says; with two of them `agreement`.

    Raises:
        AskingError: answers cannot be had, or the budget is spent; all that were given are kept.
        TemplateProblemError: the template cannot be used.
        ConservationError, QuarantineError: see `counts`.
    """
    section = JudgePairs.model_validate(config)
    template = read_question(section)
    principles = read_lines(section.principles)
    results, asked = ask_tasks(
        JOB,
        shard_tasks(inputs["ingest"]),
        section.models,
        partial(_read_prompts, dict(inputs), section, template, principles),
        partial(_write, section, out),
        context,
        lambda shards: 2 * count_judged(inputs, section.sources, shards),
    )
    both = (
        {}
        if section.second is None
        else {"agreement": agreement(add_counts(result["agreement"] for result in results))}
    )
    biases = [
        {"model": model.called, **biases_of(add_counts(result["biases"][number] for result in results))}
        for number, model in enumerate(section.models)
    ]
    return {
        "counts": balance(results, section.max_quarantined, context.stage, errors=out),
        "asked": asked,
        "unusable": sum(result["unusable"] for result in results),
        "biases": biases,
        **both,
    }


def _read_prompts(
    inputs: Mapping[str, Path], section: JudgePairs, template: PromptTemplate, principles: Sequence[str], shard: str
) -> ShardPrompts:
    """Two requests a pair: the chosen answer first, and the rejected one first."""
    read = read_judged_columns(inputs, shard, section.sources, ("id", "text", "source"))
    found: list[Request | str] = []
    for row in read.given.select(["id", "text", "source"]).to_pylist():
        pair = json.loads(row["text"])
        if REJECTED not in pair:
            found += ["it is a single answer, and no pair"] * 2
            continue
        principle = principles[seeded_key("principle", row["id"]) % len(principles)] if principles else ""
        found += in_both_orders(section, template, pair, principle, row["source"], row["id"])
    return ShardPrompts(read, found)


def in_both_orders(
    section: Comparison, template: PromptTemplate, pair: Mapping[str, str], principle: str, source: str, about: str
) -> list[Request | str]:
    """Two requests about a pair, or why there are none: the chosen answer first, and the rejected one first.

    Args:
        section: of which so many characters are shown.
        template: the question.
        pair: the texts `prompt`, `chosen` and `rejected`.
        principle: by which the answers are compared; may be empty.
        source: what the template gets by that name.
        about: the ids of what is asked about.
    """
    shown = {key: text[: section.characters] for key, text in pair.items()}
    schema = canonical_json(ANSWER).decode()
    return [
        template.request(
            {
                "prompt": shown["prompt"],
                "first": shown[first],
                "second": shown[second],
                "principle": principle,
                "source": source,
                "answer_schema": schema,
            },
            ANSWER,
            about=about,
        )
        for first, second in ((CHOSEN, REJECTED), (REJECTED, CHOSEN))
    ]


def _write(
    section: JudgePairs, out: Path, task: Task, of_shard: ShardPrompts, given: Sequence[Sequence[Answer]]
) -> Done:
    answers = [with_problems(of_shard.prompts, found) for found in given]
    errors = [
        next((one.error for judge in answers for one in judge[2 * row : 2 * row + 2] if one.error is not None), None)
        for row in range(len(of_shard.prompts) // 2)
    ]
    takes = [
        [[answer.value["better"] if answer.error is None else "same" for answer in judge[order::2]] for order in (0, 1)]
        for judge in answers
    ]
    scores = [np.array([score_of(*both) for both in zip(*judge, strict=True)], np.int64) for judge in takes]
    usable = np.array([error is None for error in errors], bool)
    columns = {
        f"{prefix}prefers": pa.array([_name(one) for one in judge.tolist()], pa.string())
        for prefix, judge in zip((FIRST, SECOND), scores, strict=False)
    }
    reasons = [
        f"{RULE}/{name}" if error is None and (name := _name(score)) in section.drop else None
        for score, error in zip(scores[0].tolist(), errors, strict=True)
    ]
    read = of_shard.read
    pairs = [json.loads(text) for text in read.given["text"].to_pylist()]
    longer = np.array([np.sign(len(one.get(CHOSEN, "")) - len(one.get(REJECTED, ""))) for one in pairs], np.int64)
    table, counts = annotate(read.documents, read.rows, read.judged, reasons, columns, errors)
    write_table(out / task.name, table)
    both = {} if len(scores) == 1 else {"agreement": count_pairs(*(one[usable].astype(float) for one in scores))}
    return Done(
        [out / task.name],
        {
            "counts": counts,
            "unusable": int((~usable).sum()),
            **both,
            "biases": [
                count_biases(np.array(judge)[:, usable], score[usable], longer[usable])
                for judge, score in zip(takes, scores, strict=True)
            ],
        },
    )


def score_of(chosen_first: str, rejected_first: str) -> int:
    """What both orders say of a pair: 1 for the chosen answer, -1 for the rejected one, 0 where it is undecided."""
    if (chosen_first, rejected_first) == ("first", "second"):
        return 1
    return -1 if (chosen_first, rejected_first) == ("second", "first") else 0


def _name(score: int) -> str:
    return {1: CHOSEN, -1: REJECTED}.get(score, UNDECIDED)


def count_biases(takes: np.ndarray, scores: np.ndarray, longer: np.ndarray) -> dict[str, int]:
    """Counts that shards add up.

    Args:
        takes: text of shape (2, n), what was taken of each pair with the chosen answer first, and last.
        scores: int64 of shape (n,), see `score_of`.
        longer: int64 of shape (n,), 1 where the chosen answer has more characters, -1 where it has fewer.
    """
    of_lengths = (scores != 0) & (longer != 0)
    return {
        "pairs": len(scores),
        "confirmed": int((scores == 1).sum()),
        "rejected": int((scores == -1).sum()),
        "first": int((takes == "first").sum()),
        "second": int((takes == "second").sum()),
        "unequal": int(of_lengths.sum()),
        "longer": int((scores == longer)[of_lengths].sum()),
        "longer_chosen": int((longer == 1)[of_lengths].sum()),
    }


def biases_of(counts: Mapping[str, int]) -> dict[str, Any]:
    """What follows from the counts, None where it is undefined.

    Returns:
        `pairs`; `decided`, the share of them of which both orders say the same; `confirmed`, of these the share of
        which the chosen answer is preferred; `first_taken`, of all verdicts for one answer the share for that which
        stood first (position bias: 0.5 has none); `longer_taken`, of decided pairs of unequal lengths the share of
        which the longer answer is preferred, and `longer_chosen` in which it was the chosen one beforehand (length
        bias: the one above the other).
    """

    def share(part: str, *whole: str) -> float | None:
        total = sum(counts.get(key, 0) for key in whole)
        return counts.get(part, 0) / total if total else None

    pairs = counts.get("pairs", 0)
    return {
        "pairs": pairs,
        "confirmed": share("confirmed", "confirmed", "rejected"),
        "decided": (counts["confirmed"] + counts["rejected"]) / pairs if pairs else None,
        "first_taken": share("first", "first", "second"),
        "longer_taken": share("longer", "unequal"),
        "longer_chosen": share("longer_chosen", "unequal"),
    }
