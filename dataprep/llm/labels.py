"""Scores of a sample of documents by a language model, from which `quality` learns.

Memory: 32 bytes per document of the sample, and the texts of one or two shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import Inputs, as_numbers
from gristmill.dataprep.llm.batch_requests import ShardPrompts, ask_shards
from gristmill.dataprep.llm.judge import GIVEN, column_of, read_prompts
from gristmill.dataprep.llm.prompt_templates import question_template
from gristmill.dataprep.llm.prompting import Answer
from gristmill.dataprep.llm.request_counts import RequestCounts
from gristmill.mixtures.steps.quality import Judge


class JudgeReport(TypedDict, total=False):
    """Answers of the judge; empty if it was not asked.

    Attributes:
        asked: requests and costs; empty if there is nothing to ask.
        unusable: documents without a usable answer.
    """

    asked: list[RequestCounts]
    unusable: int


def ask_scores(
    inputs: Inputs,
    judge: Judge,
    sources: Sequence[str] | None,
    shards: Sequence[str],
    chosen: Sequence[np.ndarray],
    context: Context,
) -> tuple[list[np.ndarray], JudgeReport]:
    """Ask the judge about the chosen documents, in the order of the shards.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        judge: model and question.
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
    template = question_template(judge)
    template.check(GIVEN)
    rows_by_shard = {
        shard: rows for shard, rows in zip(shards, chosen, strict=True) if len(rows)
    }
    score_type = judge.answer["properties"][judge.score_name]["type"]
    assert judge.model is not None
    scores = dict.fromkeys(shards, np.empty(0))

    def read(shard: str) -> ShardPrompts:
        return read_prompts(
            inputs, judge, template, sources, shard, rows_by_shard[shard]
        )

    def use(shard: str, shard_prompts: ShardPrompts, answers: Sequence[Answer]) -> None:
        scores[shard] = as_numbers(column_of(answers, judge.score_name, score_type))

    tallies = ask_shards(
        judge.model, list(rows_by_shard), read, use, context, sum(map(len, chosen))
    )
    unusable = sum(int(np.isnan(values).sum()) for values in scores.values())
    return list(scores.values()), JudgeReport(asked=tallies, unusable=unusable)
