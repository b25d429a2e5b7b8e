"""Scores of a sample of documents by a language model, from which `quality` learns.

Memory: 32 bytes per document of the sample, and the texts of one or two shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import Inputs, as_numbers
from gristmill.dataprep.llm.agreement import Agreement, agreement, count_pairs
from gristmill.dataprep.llm.batch_requests import ShardPrompts, ask_shards
from gristmill.dataprep.llm.client import RequestCounts
from gristmill.dataprep.llm.judge import GIVEN, column_of, read_prompts
from gristmill.dataprep.llm.prompt_templates import read_template
from gristmill.dataprep.llm.prompting import Answer
from gristmill.mixtures.steps.quality import Judge


class JudgeReport(TypedDict, total=False):
    """Answers of the judges; empty if they were not asked.

    Attributes:
        asked: by judge.
        unusable: documents without a usable answer of the first judge.
        agreement: of two judges, by score.
    """

    asked: list[RequestCounts]
    unusable: int
    agreement: dict[str, Agreement]


def ask_scores(
    inputs: Inputs,
    judge: Judge,
    sources: Sequence[str] | None,
    shards: Sequence[str],
    chosen: Sequence[np.ndarray],
    context: Context,
) -> tuple[list[np.ndarray], JudgeReport]:
    """Ask judges about the chosen documents, in the order of the shards.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        judge: models and question.
        sources: sources whose documents are judged; all if None.
        shards: names of n document shards.
        chosen: per shard the rows to ask about: int64, ascending, all of them judged
            rows.

    Returns:
        per shard the scores of its rows (float64, NaN without a usable answer); and a
        report for the summary.

    Raises:
        AskingError: answers are unavailable, or the budget is spent; all answers
            received are stored.
        TemplateProblemError: the template cannot be used.
    """
    template = read_template(judge.template, f"judge-{judge.rubric}")
    template.check(GIVEN)
    rows_by_shard = {
        shard: rows for shard, rows in zip(shards, chosen, strict=True) if len(rows)
    }
    score_type = judge.answer["properties"][judge.score_name]["type"]
    no_scores = [np.empty(0)] * len(judge.models)
    scores = dict.fromkeys(shards, no_scores)

    def read(shard: str) -> ShardPrompts:
        return read_prompts(
            inputs, judge, template, sources, shard, rows_by_shard[shard]
        )

    def use(
        shard: str, shard_prompts: ShardPrompts, answers: Sequence[Sequence[Answer]]
    ) -> None:
        scores[shard] = [
            as_numbers(column_of(judge_answers, judge.score_name, score_type))
            for judge_answers in answers
        ]

    tallies = ask_shards(
        judge.models, list(rows_by_shard), read, use, context, sum(map(len, chosen))
    )
    first, *second = map(np.concatenate, zip(no_scores, *scores.values(), strict=True))
    report = JudgeReport(asked=tallies, unusable=int(np.isnan(first).sum()))
    if second:
        report["agreement"] = {
            judge.score_name: agreement(count_pairs(first, second[0]))
        }
    return [shard_scores[0] for shard_scores in scores.values()], report
