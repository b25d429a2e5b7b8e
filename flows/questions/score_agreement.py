"""`gristmill whatif --scores`: agreement of scores with each other, and with the mean of
each document's source.

A score that follows the source selects sources rather than documents: the area under
the curve (AUC) says how well the mean of the source alone predicts which documents have
the largest scores (0.5 is chance, 1 is certainty).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from gristmill.dataprep.corpus import Corpus
from gristmill.flows.pages.page_elements import Parts, table
from gristmill.flows.pages.terminal_pages import Answer
from gristmill.flows.questions.query import QueryError, ask
from gristmill.mixtures.yaml_text import unknown_name

RANKS = """
    SELECT *, rank() OVER (ORDER BY {0}) + (count(*) OVER (PARTITION BY {0}) - 1) / 2.0
    AS {1} FROM {2}
"""
"""Ranks of a column from 1; equal values have their mean rank."""
TOP = "row_number() OVER (ORDER BY {} DESC, id) <= ceil({} * count(*) OVER ())"
"""True for the documents with the largest values."""
AGREEMENT = f"""
WITH scored AS (SELECT id, "{{a}}" AS a, "{{b}}" AS b FROM documents
                WHERE kept AND "{{a}}" IS NOT NULL AND "{{b}}" IS NOT NULL),
first AS ({RANKS.format("a", "rank_a", "scored")}),
second AS ({RANKS.format("b", "rank_b", "first")}),
chosen AS (SELECT rank_a, rank_b, {TOP.format("a", "{top}")} AS top_a,
           {TOP.format("b", "{top}")} AS top_b FROM second)
SELECT count(*), corr(rank_a, rank_b),
       count(*) FILTER (top_a AND top_b) / count(*) FILTER (top_a) FROM chosen
"""
BY_SOURCE = f"""
WITH scored AS (SELECT id, source, "{{a}}" AS a FROM documents
                WHERE kept AND "{{a}}" IS NOT NULL),
means AS (SELECT *, avg(a) OVER (PARTITION BY source) AS mean,
          {TOP.format("a", "{top}")} AS positive FROM scored),
ranked AS ({RANKS.format("mean", "place", "means")})
SELECT count(*), (sum(place) FILTER (positive)
       - count(*) FILTER (positive) * (count(*) FILTER (positive) + 1) / 2.0)
       / (count(*) FILTER (positive) * count(*) FILTER (NOT positive)),
       count(DISTINCT source) FROM ranked
"""


@dataclass(frozen=True)
class PairAgreement:
    """Agreement of two scores on the documents that have both.

    Attributes:
        rank_correlation: Spearman's; None if a score has one value.
        top_overlap: share of the documents with the largest values of one that the
            other has among its own.
    """

    scores: tuple[str, str]
    documents: int
    rank_correlation: float | None
    top_overlap: float | None


@dataclass(frozen=True)
class SourceAgreement:
    """Prediction of the largest values of a score by the mean of the source alone."""

    score: str
    documents: int
    sources: int
    auc: float | None


@dataclass(frozen=True)
class ScoreAgreement(Answer):
    """Agreement of scores; `top` is the share of the largest values."""

    top: float
    pairs: list[PairAgreement]
    by_source: list[SourceAgreement]

    def parts(self) -> list[Parts]:
        """Return the agreement of pairs, and with sources, as parts of a page."""
        overlap = f"overlap of the top {self.top:.0%}"
        pairs = [
            [*pair.scores, pair.documents, pair.rank_correlation, pair.top_overlap]
            for pair in self.pairs
        ]
        sources = [
            [each.score, each.documents, each.sources, each.auc]
            for each in self.by_source
        ]
        counts = {"documents": ","}
        names = {"score": "", "other": ""}
        ranks = {"rank correlation": ".3f", overlap: ".1%"}
        auc = {"sources": "d", "AUC of the source's mean": ".3f"}
        return [
            table({**names, **counts, **ranks}, pairs),
            table({"score": "", **counts, **auc}, sources),
        ]


def compare_scores(corpus: Corpus, scores: Sequence[str], top: float) -> ScoreAgreement:
    """Compare columns of numbers on the kept documents.

    Raises:
        QueryError: there is no such column, or it is not a number.
    """
    known = corpus.schema.names
    for name in scores:
        if name not in known:
            raise QueryError(f"there is no column {unknown_name(name, known)}")
    pairs = [
        PairAgreement((a, b), *_one_row(corpus, AGREEMENT.format(a=a, b=b, top=top)))
        for a, b in combinations(scores, 2)
    ]
    by_source = []
    for name in scores:
        documents, auc, sources = _one_row(corpus, BY_SOURCE.format(a=name, top=top))
        by_source.append(SourceAgreement(name, documents, sources, auc))
    return ScoreAgreement(top, pairs, by_source)


def _one_row(corpus: Corpus, sql: str) -> Any:
    with ask(corpus, sql) as answer:
        (row,) = answer.rows()
    return row
