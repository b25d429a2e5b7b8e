"""Agreement of scores: the values of SciPy and scikit-learn on the same documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.documents import annotate, read_table, write_table
from gristmill.flows.questions.query import QueryError
from gristmill.flows.questions.score_agreement import compare_scores
from tests.dataprep.document_shards import write_shards

DOCUMENTS = 300
SOURCES = np.array(["books", "code", "web"])


def scored(
    folder: Path, source: np.ndarray, kept: np.ndarray, **scores: pa.Array
) -> Corpus:
    """Write documents with scores in two shards."""
    documents = [
        (str(SOURCES[number]), str(place), f"text {place}")
        for place, number in enumerate(source)
    ]
    cut = len(documents) // 3
    ingest = write_shards(folder / "ingest", [documents[:cut], documents[cut:]])
    reasons = [None if keep else "rule" for keep in kept]
    for path, rows in zip(
        sorted(ingest.iterdir()), (slice(cut), slice(cut, None)), strict=True
    ):
        table = read_table(path)
        every = np.arange(len(table))
        columns = {name: values[rows] for name, values in scores.items()}
        judged = annotate(table, every, every, reasons[rows], columns)[0]
        write_table(folder / "score" / path.name, judged)
    return Corpus({"ingest": ingest, "score": folder / "score"})


def test_agreement_is_that_of_scipy_and_scikit_learn(tmp_path: Path) -> None:
    """Documents of three sources with two scores, with ties and a few nulls."""
    draw = np.random.default_rng(9)
    source = draw.integers(0, 3, DOCUMENTS)
    first = np.round(source + draw.normal(0, 1, DOCUMENTS), 1)
    second = np.round(first + draw.normal(0, 1, DOCUMENTS), 1)
    known = draw.random(DOCUMENTS) < 0.95
    kept = draw.random(DOCUMENTS) < 0.9
    scores = {"a": pa.array(first), "b": pa.array(second, mask=~known)}
    corpus = scored(tmp_path, source, kept, **scores)
    agreement = compare_scores(corpus, ["a", "b"], 0.1)
    both = known & kept
    a, b = first[both], second[both]
    (pair,) = agreement.pairs
    assert pair.documents == both.sum()
    assert pair.rank_correlation == pytest.approx(spearmanr(a, b).statistic, abs=1e-9)
    number = int(np.ceil(0.1 * len(a)))
    assert pair.top_overlap is not None
    # ties at the border go to the larger id, so the share is known within them
    certain = (a > np.sort(a)[-number]) & (b > np.sort(b)[-number])
    possible = (a >= np.sort(a)[-number]) & (b >= np.sort(b)[-number])
    assert certain.sum() <= round(pair.top_overlap * number) <= possible.sum()
    values, places = first[kept], source[kept]
    means = np.array([values[places == number].mean() for number in range(3)])[places]
    one = agreement.by_source[0]
    assert (one.score, one.documents, one.sources) == ("a", kept.sum(), 3)
    # the largest tenth, with ties at the border in any way
    number = int(np.ceil(0.1 * len(values)))
    border = np.sort(values)[-number]
    bounds = [
        roc_auc_score(values > border, means),
        roc_auc_score(values >= border, means),
    ]
    assert one.auc is not None
    assert min(bounds) - 0.03 <= one.auc <= max(bounds) + 0.03
    assert one.auc > 0.7


def test_score_that_is_the_source_is_predicted_by_it(tmp_path: Path) -> None:
    source = np.arange(30) % 3
    scores = {"a": pa.array(source), "b": pa.array(-source)}
    corpus = scored(tmp_path, source, np.ones(30, bool), **scores)
    agreement = compare_scores(corpus, ["a", "b"], 1 / 3)
    assert agreement.pairs[0].rank_correlation == pytest.approx(-1)
    assert agreement.pairs[0].top_overlap == 0
    assert [one.auc for one in agreement.by_source] == [1.0, 1.0]
    with pytest.raises(QueryError, match="'c'"):
        compare_scores(corpus, ["c"], 0.1)
    with pytest.raises(QueryError):
        compare_scores(corpus, ["text", "a"], 0.1)
