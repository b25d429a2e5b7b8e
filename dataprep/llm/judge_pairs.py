"""Step `judge_pairs`: a language model compares the two answers of each pair, in both
orders.

A judge prefers an answer if it picks that answer in both orders; if it picks the same
position twice, the pair is undecided (Zheng et al. 2023, "Judging LLM-as-a-Judge",
section 3.4). The texts of the documents are pairs as JSON (`pair_text`). Memory: the
pairs of the shards in progress.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.files import canonical_json
from gristmill.core.seeds import seeded_key
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counted, Counts, add_counts, balance
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.llm.batch_requests import (
    ShardPrompts,
    ask_tasks,
    count_judged,
    first_error,
)
from gristmill.dataprep.llm.prompt_templates import (
    PromptTemplate,
    read_lines,
    read_template,
)
from gristmill.dataprep.llm.prompting import Answer, Request, Schema
from gristmill.dataprep.llm.request_counts import RequestCounts
from gristmill.dataprep.runners.tasks import Done, ShardTask, shard_tasks
from gristmill.dataprep.user_code.own_documents import read_judged_columns
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.judge import PREFIX
from gristmill.mixtures.steps.judge_pairs import (
    REJECTED,
    UNDECIDED,
    Comparison,
    JudgePairs,
)

QUESTION = "compare-pairs"
GIVEN = ("prompt", "first", "second", "principle", "source", "answer_schema")
"""Names that templates may use."""
ANSWER: Schema = {
    "type": "object",
    "properties": {
        "better": {"enum": ["first", "second", "same"]},
        "reason": {"type": "string"},
    },
    "required": ["better"],
}
CHOSEN = "chosen"
RULE = "judge_pairs"


def pair_text(prompt_text: str, chosen: str, rejected: str) -> str:
    """Text of a document that is a pair, as JSON."""
    return json.dumps(
        {"prompt": prompt_text, CHOSEN: chosen, REJECTED: rejected}, ensure_ascii=False
    )


def read_question(section: Comparison) -> PromptTemplate:
    """Template of the question to the judge.

    Raises:
        TemplateProblemError: it cannot be read, or uses an unknown name.
    """
    template = read_template(section.template, QUESTION)
    template.check(GIVEN)
    return template


class Biases(TypedDict):
    """Position and length bias of a judge; a share of nothing is None.

    Attributes:
        model: name of the judge.
        confirmed: share of decided pairs in which the chosen answer is preferred.
        decided: share of pairs with the same verdict in both orders.
        first_taken: share of verdicts for the first position; 0.5 is no position bias.
        longer_taken: share of decided pairs of unequal lengths in which the longer
            answer is preferred.
        longer_chosen: share in which it is the chosen answer; `longer_taken` above it
            is a length bias.
    """

    model: str
    pairs: int
    confirmed: float | None
    decided: float | None
    first_taken: float | None
    longer_taken: float | None
    longer_chosen: float | None


@dataclass(frozen=True)
class JudgePairsSummary:
    """Summary of the comparisons.

    Attributes:
        counts: pairs by outcome.
        asked: requests and costs; empty if all answers were received before.
        unusable: pairs without two usable answers.
        biases: of the judge.
    """

    counts: Counts
    asked: Sequence[RequestCounts]
    unusable: int
    biases: Biases


class ComparedShard(Counted):
    """Result of comparing the pairs of a shard."""

    unusable: int
    biases: dict[str, int]
    """Numbers of verdicts and positions, which add up over shards."""


def run(
    inputs: Inputs, config: Recipe, out: Path, context: Context
) -> JudgePairsSummary:
    """Ask a judge about every kept pair, and drop pairs that it does not confirm.

    Args:
        inputs: `ingest`, with pairs as texts, and the annotating stages that ran
            before.
        config: the section `judge_pairs`.

    Raises:
        AskingError: answers are unavailable, or the budget is spent; all answers
            received are stored.
        TemplateProblemError: the template cannot be used.
        ConservationError, QuarantineError: see `counts`.
    """
    section = JudgePairs.model_validate(config)
    template = read_question(section)
    principles = read_lines(section.principles)
    results, tallies = ask_tasks(
        RULE,
        shard_tasks(inputs["ingest"]),
        section.model,
        partial(_read_prompts, inputs, section, template, principles),
        partial(_write, section, out),
        context,
        lambda shards: 2 * count_judged(inputs, section.sources, shards),
    )
    biases = biases_of(
        section.model.called, add_counts(result["biases"] for result in results)
    )
    return JudgePairsSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        tallies,
        sum(result["unusable"] for result in results),
        biases,
    )


def _read_prompts(
    inputs: Inputs,
    section: JudgePairs,
    template: PromptTemplate,
    principles: Sequence[str],
    shard: str,
) -> ShardPrompts:
    """Prompts of a shard, two per pair: the chosen answer first, and the rejected
    answer first.
    """
    read = read_judged_columns(inputs, shard, section.sources, ("id", "text", "source"))
    prompts: list[Request | str] = []
    for row in read.given.select(["id", "text", "source"]).to_pylist():
        pair = json.loads(row["text"])
        principle = drawn(principles, seeded_key("principle", row["id"]))
        prompts += in_both_orders(
            section, template, pair, principle, row["source"], row["id"]
        )
    return ShardPrompts(read, prompts)


def drawn(principles: Sequence[str], key: int) -> str:
    """Principle that a key chooses, or an empty text."""
    return principles[key % len(principles)] if principles else ""


def in_both_orders(
    section: Comparison,
    template: PromptTemplate,
    pair: Mapping[str, str],
    principle: str,
    source: str,
    about: str,
) -> list[Request | str]:
    """Two requests about a pair, or the reasons for having none: the chosen answer
    first, and the rejected answer first.

    Args:
        section: comparison settings; `characters` limits each text.
        template: the question.
        pair: the texts `prompt`, `chosen` and `rejected`.
        principle: criterion of the comparison; may be empty.
        source: value of `source` in the template.
        about: ids of the documents that the prompt is about.
    """
    shortened = {key: text[: section.characters] for key, text in pair.items()}
    schema = canonical_json(ANSWER).decode()
    return [
        template.request(
            {
                "prompt": shortened["prompt"],
                "first": shortened[first],
                "second": shortened[second],
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
    section: JudgePairs,
    out: Path,
    task: ShardTask,
    shard_prompts: ShardPrompts,
    answers: Sequence[Answer],
) -> Done[ComparedShard]:
    errors = [first_error(answers[row : row + 2]) for row in range(0, len(answers), 2)]
    picks = np.array(
        [
            answer.value["better"] if answer.error is None else "same"
            for answer in answers
        ],
        str,
    ).reshape(-1, 2)
    scores = np.array([score_of(*pair) for pair in picks.tolist()], np.int64)
    names = {1: CHOSEN, -1: REJECTED, 0: UNDECIDED}
    verdicts = [names[score] for score in scores.tolist()]
    usable = np.array([error is None for error in errors], bool)
    columns = {f"{PREFIX}prefers": pa.array(verdicts, pa.string())}
    reasons = [
        f"{RULE}/{verdict}" if error is None and verdict in section.drop else None
        for verdict, error in zip(verdicts, errors, strict=True)
    ]
    read = shard_prompts.read
    pairs = [json.loads(text) for text in read.given["text"].to_pylist()]
    lengths = [[len(pair[name]) for pair in pairs] for name in (CHOSEN, REJECTED)]
    longer = np.sign(np.subtract(*np.array(lengths, np.int64)))
    counts = read.write(out / task.name, reasons, columns, errors)
    takes, scores, longer = picks[usable], scores[usable], longer[usable]
    comparable = (scores != 0) & (longer != 0)
    result = ComparedShard(
        counts=counts,
        unusable=int((~usable).sum()),
        biases={
            "pairs": len(scores),
            "confirmed": int((scores == 1).sum()),
            "rejected": int((scores == -1).sum()),
            "first": int((takes == "first").sum()),
            "second": int((takes == "second").sum()),
            "unequal": int(comparable.sum()),
            "longer": int((scores == longer)[comparable].sum()),
            "longer_chosen": int((longer == 1)[comparable].sum()),
        },
    )
    return Done([out / task.name], result)


def score_of(chosen_first: str, rejected_first: str) -> int:
    """Verdict of both orders: 1 for the chosen answer, -1 for the rejected answer, 0 if
    undecided.
    """
    if (chosen_first, rejected_first) == ("first", "second"):
        return 1
    return -1 if (chosen_first, rejected_first) == ("second", "first") else 0


def biases_of(model: str, counts: Mapping[str, int]) -> Biases:
    """Position and length bias of a judge, from the counts of `ComparedShard`."""

    def share(part: str, *total_keys: str) -> float | None:
        total = sum(counts.get(key, 0) for key in total_keys)
        return counts.get(part, 0) / total if total else None

    pairs = counts.get("pairs", 0)
    decided = counts.get("confirmed", 0) + counts.get("rejected", 0)
    return {
        "model": model,
        "pairs": pairs,
        "confirmed": share("confirmed", "confirmed", "rejected"),
        "decided": decided / pairs if pairs else None,
        "first_taken": share("first", "first", "second"),
        "longer_taken": share("longer", "unequal"),
        "longer_chosen": share("longer_chosen", "unequal"),
    }
