"""Small classifier distilled from a judge, whose scores of a sample become scores of
all documents.

The judge's score of a document is a column of an earlier step, a key of its metadata,
or the answer of a language model for each sampled document
(`dataprep/llm/labels.py`). A document with a score of at least `at_least` is good.
The classifier learns to separate good documents from the others, by scikit-learn's
logistic regression on sentence embeddings or by fastText, and its probability of good
is the column `quality`. Documents are sampled by a hash of their ids; a tenth of the
sample is held out to measure agreement with the judge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.files import (
    as_path,
    is_local,
    json_bytes,
    read_json,
    sha256_file,
    write_bytes,
)
from gristmill.core.stage_context import Context
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.documents import (
    Inputs,
    as_numbers,
    read_shard,
    read_table,
    shard_names,
    write_table,
)
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.encoders.model_folders import folder_sha256, needed
from gristmill.dataprep.fasttext.fasttext_predict import load_model
from gristmill.dataprep.llm.labels import JudgeReport, ask_scores
from gristmill.dataprep.quality.classifier import as_line, score_texts, train
from gristmill.dataprep.quality.labelled_examples import QualityError, draw, split_draws
from gristmill.dataprep.runners.tasks import Done, Task
from gristmill.mixtures.steps.quality import Classifier, Judge, Quality
from gristmill.mixtures.yaml_text import unknown_name

DISTILLED, EMBEDDING = "distilled", "embedding"
"""Names of the models of the step: the trained classifier, and the embedding model."""
ASKED = "asked.parquet"
"""File of the scores from a judge that the step asks itself."""
LINEAR_FILE, FASTTEXT_FILE = "linear.json", "distilled.bin"
BY_FASTTEXT = Classifier(positive=("judged good",), negative=("judged otherwise",))
"""Settings of the classifier of `distil: fasttext`: the defaults of a classifier of two
classes.
"""
HELD_OUT = 0.1
CALIBRATION_BINS = 10
MOST_ITERATIONS = 1_000
"""Iterations of scikit-learn's solver; its default of 100 is too few for some
embeddings.
"""


class Labelled(NamedTuple):
    """Documents with a judge's score.

    Attributes:
        shards, rows: int64 of shape (n,), shard and row of each document.
        scores: float64, the judge's scores.
        draws: uint64 of shape (n, 2), see `labelled_examples.draw`.
    """

    shards: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    draws: np.ndarray

    def take(self, places: np.ndarray) -> Labelled:
        """Select documents by position."""
        return Labelled(*(column[places] for column in self))


def choose_sample(inputs: Inputs, section: Quality) -> Labelled:
    """Sample documents to train and evaluate the classifier: `sample` of the documents
    with a score, by hash.

    For a language model as judge, all documents are candidates, with a score of 0.

    Raises:
        QualityError: the column of the judge does not exist.
    """
    assert section.judge is not None
    no_rows = np.empty(0, np.int64)
    sample = Labelled(no_rows, no_rows, np.empty(0), np.empty((0, 2), np.uint64))
    for number, shard in enumerate(shard_names(inputs["ingest"])):
        columns = ["id", "source", "metadata"]
        read = read_shard(inputs, shard, columns, section.sources)
        scores = read_scores(inputs, shard, section.judge, read.documents["metadata"])
        scores = scores[read.judged]
        rows = read.judged[~np.isnan(scores)]
        ids = read.documents["id"].take(rows).to_pylist()
        shard_sample = Labelled(
            np.full(len(rows), number),
            rows,
            scores[~np.isnan(scores)],
            draw(ids, section.key_seed),
        )
        merged = Labelled(*map(np.concatenate, zip(sample, shard_sample, strict=True)))
        sample = merged.take(
            np.argsort(merged.draws[:, 1], kind="stable")[: section.sample]
        )
    return sample


def read_scores(
    inputs: Inputs, shard: str, judge: Judge, metadata: pa.ChunkedArray
) -> np.ndarray:
    """Read the judge's score of each document of a shard: float64, NaN for a missing
    score.

    Raises:
        QualityError: the column does not exist or is not numeric.
    """
    if judge.model is not None:
        return np.zeros(len(metadata))
    if judge.column is None:
        answers = [
            json.loads(text or "{}").get(judge.metadata)
            for text in metadata.to_pylist()
        ]
        return np.array(
            [
                answer if isinstance(answer, int | float) else np.nan
                for answer in answers
            ],
            np.float64,
        )
    corpus = Corpus(inputs)
    if judge.column not in corpus.measured:
        raise QualityError(
            "quality.judge.column: no step before measures "
            f"{unknown_name(judge.column, corpus.measured)}"
        )
    column = corpus.read(shard, [judge.column], kept=None)[judge.column]
    try:
        return as_numbers(column)
    except pa.ArrowInvalid as error:
        raise QualityError(
            f"quality.judge.column: {judge.column} holds no numbers: {error}"
        ) from error


def write_asked(
    task: Task, inputs: Inputs, section: Quality, context: Context
) -> Done[JudgeReport]:
    """Ask the judge about the sample, and write its scores: a row per scored document
    with the fields of `Labelled`.
    """
    assert section.judge is not None
    sample = choose_sample(inputs, section)
    shards = shard_names(inputs["ingest"])
    sample = sample.take(np.lexsort((sample.rows, sample.shards)))
    rows_by_shard = [
        sample.rows[sample.shards == number] for number in range(len(shards))
    ]
    scores, report = ask_scores(
        inputs, section.judge, section.sources, shards, rows_by_shard, context
    )
    scored = sample._replace(scores=np.concatenate([np.empty(0), *scores]))
    answered = np.flatnonzero(~np.isnan(scored.scores))
    # order of `choose_sample`
    scored = scored.take(answered[np.argsort(scored.draws[answered, 1], kind="stable")])
    path = context.work / ASKED
    write_table(
        path,
        pa.table(
            {
                "shard": scored.shards,
                "row": scored.rows,
                "score": scored.scores,
                "held": scored.draws[:, 0],
                "order": scored.draws[:, 1],
            }
        ),
    )
    return Done([path], report)


def read_texts(inputs: Inputs, chosen: Labelled) -> list[str]:
    """Read the texts of documents in order."""
    names = shard_names(inputs["ingest"])
    texts = [""] * len(chosen.rows)
    for number in np.unique(chosen.shards).tolist():
        positions = np.flatnonzero(chosen.shards == number)
        column = read_shard(inputs, names[number], ["id", "text"]).documents["text"]
        for position in positions.tolist():
            texts[position] = column[int(chosen.rows[position])].as_py()
    return texts


class ModelFile(TypedDict):
    """File or folder of a model."""

    path: str
    sha256: str


class Distilled(ModelFile):
    """Result of training the classifier.

    Attributes:
        sample: documents that the judge scored.
        good: good ones of these.
        learnt: documents that it learned from.
        held_out_scores: scores of the held-out documents.
    """

    sample: int
    good: int
    learnt: int
    held_out_good: list[bool]
    held_out_scores: list[float]


def train_distilled(
    task: Task,
    inputs: Inputs,
    section: Quality,
    out: Path,
    work: Path,
) -> Done[Distilled]:
    """Train the classifier, write it, and score the held-out documents.

    Raises:
        QualityError: fewer than two documents are good, or fewer than two are not.
    """
    assert section.judge is not None
    if section.judge.model is None:
        sample = choose_sample(inputs, section)
    else:
        shards, rows, scores, *draws = (
            column.to_numpy() for column in read_table(work / ASKED).columns
        )
        sample = Labelled(shards, rows, scores, np.stack(draws, axis=1))
    good = sample.scores >= section.judge.at_least
    to_learn, held_out = np.empty((2, 0), np.int64)
    for is_good in (True, False):
        places = np.flatnonzero(good == is_good)
        if len(places) < 2:
            raise QualityError(
                f"quality: of {len(good):,} documents that the judge scored, "
                f"{len(places)} have {'at least' if is_good else 'less than'} "
                f"{section.judge.at_least:g}, too few to learn from; change "
                "judge.at_least, or let it judge more documents"
            )
        selections = split_draws(sample.draws[places], HELD_OUT, section.sample)
        to_learn = np.append(to_learn, places[selections[0]])
        held_out = np.append(held_out, places[selections[1]])
    to_learn.sort()
    held_out.sort()
    texts = read_texts(inputs, sample)
    texts_to_learn = [texts[place] for place in to_learn]
    name, content = _learn(section, texts_to_learn, good[to_learn], work)
    write_bytes(out / name, content)
    sha256 = hashlib.sha256(content).hexdigest()
    model_file = ModelFile(path=str(out / name), sha256=sha256)
    score = load_distilled(section, {DISTILLED: model_file, **embedding_files(section)})
    scores = score(pa.array([texts[place] for place in held_out], pa.large_string()))
    return Done(
        [out / name],
        {
            **model_file,
            "sample": len(good),
            "good": int(good.sum()),
            "learnt": len(to_learn),
            "held_out_good": good[held_out].tolist(),
            "held_out_scores": scores.tolist(),
        },
    )


def _learn(
    section: Quality, texts: Sequence[str], good: np.ndarray, work: Path
) -> tuple[str, bytes]:
    """Train a classifier and return its file: name and content."""
    if section.embedding is None:
        lines = (
            (bool(is_good), as_line(text, BY_FASTTEXT))
            for is_good, text in zip(good, texts, strict=True)
        )
        return FASTTEXT_FILE, train(
            lines, BY_FASTTEXT, section.key_seed, work if is_local(work) else None
        )
    linear = needed("sklearn.linear_model").LogisticRegression(max_iter=MOST_ITERATIONS)
    sha256 = folder_sha256(section.embedding.path)
    linear.fit(load_embedder(section.embedding, sha256).embed(texts), good)
    return LINEAR_FILE, json_bytes(
        {"weights": linear.coef_[0].tolist(), "bias": float(linear.intercept_[0])}
    )


def embedding_files(section: Quality) -> dict[str, ModelFile]:
    """Embedding model of the classifier in the form of `scorers.ModelFiles`; empty if
    it does not use embeddings.
    """
    if section.embedding is None:
        return {}
    path = section.embedding.path
    return {EMBEDDING: ModelFile(path=path, sha256=folder_sha256(path))}


def load_distilled(
    section: Quality, models: Mapping[str, ModelFile]
) -> Callable[[pa.Array], np.ndarray]:
    """Load the classifier as a function of n texts that returns their probabilities of
    good, rounded to thousandths.
    """
    path = models[DISTILLED]["path"]
    sha256 = models[DISTILLED]["sha256"]
    if section.embedding is None:
        model = load_model(path, sha256)
        return lambda texts: score_texts(model, texts, BY_FASTTEXT)
    weights, bias = _read_linear(path, sha256)
    embedder = load_embedder(section.embedding, models[EMBEDDING]["sha256"])

    def score(texts: pa.Array) -> np.ndarray:
        logits = embedder.embed(texts.to_pylist()).astype(np.float64) @ weights + bias
        return np.round(1 / (1 + np.exp(-logits)), 3)

    return score


@lru_cache(maxsize=4)
def _read_linear(path: str, sha256: str) -> tuple[np.ndarray, float]:
    location = as_path(path)
    assert sha256_file(location) == sha256
    parameters = read_json(location)
    return np.array(parameters["weights"], np.float64), float(parameters["bias"])


def calibrate(good: np.ndarray, scores: np.ndarray) -> list[dict[str, float]]:
    """Calibration table: number, mean score and share of good documents for each
    non-empty tenth of the score.
    """
    bins = np.minimum(
        (scores * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1
    )
    return [
        {
            "from": place / CALIBRATION_BINS,
            "documents": int((bins == place).sum()),
            "score": float(scores[bins == place].mean()),
            "good": float(good[bins == place].mean()),
        }
        for place in np.unique(bins).tolist()
    ]


def count_confusion(good: np.ndarray, scores: np.ndarray, cut: float) -> dict[str, int]:
    """Confusion matrix of the judge's labels and the classifier's at a cut."""
    kept = scores >= cut
    return {
        "good_kept": int((good & kept).sum()),
        "good_dropped": int((good & ~kept).sum()),
        "other_kept": int((~good & kept).sum()),
        "other_dropped": int((~good & ~kept).sum()),
    }
