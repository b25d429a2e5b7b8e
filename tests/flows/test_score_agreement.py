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


@pytest.fixture
def scored(tmp_path: Path) -> tuple[Corpus, dict[str, np.ndarray]]:
    """Documents of three sources with two scores, with ties and a few nulls."""
    draw = np.random.default_rng(9)
    source = draw.integers(0, 3, DOCUMENTS)
    first = np.round(source + draw.normal(0, 1, DOCUMENTS), 1)
    second = np.round(first + draw.normal(0, 1, DOCUMENTS), 1)
    known = draw.random(DOCUMENTS) < 0.95
    kept = draw.random(DOCUMENTS) < 0.9
    documents = [
        (str(SOURCES[number]), f"{place}", f"text {place}")
        for place, number in enumerate(source)
    ]
    ingest = write_shards(tmp_path / "ingest", [documents[:100], documents[100:]])
    for shard, rows in ((0, slice(0, 100)), (1, slice(100, None))):
        name = f"part-{shard:05d}.parquet"
        table = read_table(ingest / name)
        every = np.arange(len(table))
        columns = {
            "a": pa.array(first[rows]),
            "b": pa.array(second[rows], mask=~known[rows]),
        }
        reasons = [None if keep else "rule" for keep in kept[rows]]
        write_table(
            tmp_path / "score" / name,
            annotate(table, every, every, reasons, columns)[0],
        )
    corpus = Corpus({"ingest": ingest, "score": tmp_path / "score"})
    arrays = {"source": source, "a": first, "b": second, "known": known, "kept": kept}
    return corpus, arrays


def test_agreement_is_that_of_scipy_and_scikit_learn(
    scored: tuple[Corpus, dict[str, np.ndarray]],
) -> None:
    corpus, arrays = scored
    agreement = compare_scores(corpus, ["a", "b"], 0.1)
    both = arrays["known"] & arrays["kept"]
    a, b = arrays["a"][both], arrays["b"][both]
    (pair,) = agreement.pairs
    assert pair.documents == both.sum()
    assert pair.rank_correlation == pytest.approx(spearmanr(a, b).statistic, abs=1e-9)
    number = int(np.ceil(0.1 * len(a)))
    assert pair.top_overlap is not None
    # ties at the border go to the larger id, so the share is known within them
    certain = (a > np.sort(a)[-number]) & (b > np.sort(b)[-number])
    possible = (a >= np.sort(a)[-number]) & (b >= np.sort(b)[-number])
    assert certain.sum() <= round(pair.top_overlap * number) <= possible.sum()
    kept = arrays["kept"]
    values, source = arrays["a"][kept], arrays["source"][kept]
    means = np.array([values[source == number].mean() for number in range(3)])[source]
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
    documents = [(str(SOURCES[n % 3]), str(n), f"text {n}") for n in range(30)]
    ingest = write_shards(tmp_path / "ingest", [documents])
    table = read_table(ingest / "part-00000.parquet")
    every = np.arange(30)
    columns = {"a": pa.array(every % 3), "b": pa.array(-(every % 3))}
    write_table(
        tmp_path / "score" / "part-00000.parquet",
        annotate(table, every, every, [None] * 30, columns)[0],
    )
    corpus = Corpus({"ingest": ingest, "score": tmp_path / "score"})
    agreement = compare_scores(corpus, ["a", "b"], 1 / 3)
    assert agreement.pairs[0].rank_correlation == pytest.approx(-1)
    assert agreement.pairs[0].top_overlap == 0
    assert [one.auc for one in agreement.by_source] == [1.0, 1.0]
    with pytest.raises(QueryError, match="'c'"):
        compare_scores(corpus, ["c"], 0.1)
    with pytest.raises(QueryError):
        compare_scores(corpus, ["text", "a"], 0.1)
