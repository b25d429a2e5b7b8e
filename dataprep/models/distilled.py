"""A small classifier that learns from a judge: labels of a sample of documents become a score of all of them.

A judge's score of a document is a column that a step before has measured, a key of its metadata, or what a language
model answers that is asked about the sample alone (`dataprep/asking/sampled_scores.py`). What has at least
`at_least` is good. The classifier learns good from other documents, by scikit-learn's logistic regression on sentence
embeddings or by fastText, and its probability of good is the column `quality`. Documents are drawn by a hash of their
ids; a tenth of them is held out, and measures how far the classifier agrees with the judge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.asking.sampled_scores import ask_scores
from gristmill.dataprep.context import Context
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.documents import judged_rows, read_shard, read_table, shard_names, write_table
from gristmill.dataprep.files import as_path, atomic_write, is_local, json_bytes, sha256_file
from gristmill.dataprep.jobs.engine import Done, Task
from gristmill.dataprep.judges.classifier import as_line, score_texts, train
from gristmill.dataprep.judges.labelled_examples import QualityError, draw, split_draws
from gristmill.dataprep.judges.predictors import load_model
from gristmill.dataprep.models.embeddings import load_embedder
from gristmill.dataprep.models.model_folders import folder_sha256, needed
from gristmill.mixtures.steps.quality import Classifier, Judge, Quality
from gristmill.mixtures.yaml_text import did_you_mean

DISTILLED, EMBEDDING = "distilled", "embedding"
"""Names of the models of such a step: what it trains, and the folder that gives vectors."""
ASKED = "asked.parquet"
"""Of a judge that is asked by the step itself, what it said."""
LINEAR_FILE, FASTTEXT_FILE = "linear.json", "distilled.bin"
BY_FASTTEXT = Classifier(positive=("judged good",), negative=("judged otherwise",))
"""The settings of the classifier of `distil: fasttext`: the defaults of one that is trained on two classes."""
HELD_OUT = 0.1
CALIBRATION_BINS = 10
MOST_ITERATIONS = 1_000
"""Of scikit-learn's solver, whose default of 100 is too few for some embeddings."""


@dataclass(frozen=True)
class Labelled:
    """Documents with a judge's score.

    Attributes:
        shards, rows: int64 of shape (n,), where each is.
        scores: float64, what the judge said.
        draws: uint64 of shape (n, 2), see `labelled_examples.draw`.
    """

    shards: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    draws: np.ndarray

    def take(self, places: np.ndarray) -> Labelled:
        """Some of them."""
        return Labelled(self.shards[places], self.rows[places], self.scores[places], self.draws[places])


def choose_sample(inputs: Mapping[str, Path], section: Quality) -> Labelled:
    """The documents that are learnt from and measured with: `sample` of those that have a score, by hash.

    With a judge that is to be asked it is `sample` of all of them, and every score is 0.

    Raises:
        QualityError: there is no such column.
    """
    assert section.judge is not None
    none = np.empty(0, np.int64)
    found = Labelled(none, none, np.empty(0), np.empty((0, 2), np.uint64))
    for number, shard in enumerate(shard_names(inputs["ingest"])):
        read = read_shard(inputs, shard, ["id", "source", "metadata"])
        judged = judged_rows(read.documents, read.rows, section.sources)
        scores = read_scores(inputs, shard, section.judge, read.documents["metadata"])[judged]
        rows = judged[~np.isnan(scores)]
        ids = read.documents["id"].take(pa.array(rows)).to_pylist()
        own = Labelled(np.full(len(rows), number), rows, scores[~np.isnan(scores)], draw(ids, section.key_seed))
        both = Labelled(
            *(
                np.concatenate([getattr(part, name) for part in (found, own)])
                for name in ("shards", "rows", "scores", "draws")
            )
        )
        found = both.take(np.argsort(both.draws[:, 1], kind="stable")[: section.sample])
    return found


def read_scores(inputs: Mapping[str, Path], shard: str, judge: Judge, metadata: pa.ChunkedArray) -> np.ndarray:
    """What the judge said of each document of a shard: float64, NaN where it said nothing.

    Raises:
        QualityError: there is no such column, or it holds no numbers.
    """
    if judge.model is not None:
        return np.zeros(len(metadata))
    if judge.column is None:
        said = [json.loads(text or "{}").get(judge.metadata) for text in metadata.to_pylist()]
        return np.array([float(one) if isinstance(one, int | float) else np.nan for one in said], np.float64)
    corpus = Corpus(inputs)
    if judge.column not in corpus.measured:
        raise QualityError(
            f"quality.judge.column: no step before measures {judge.column!r}"
            f"{did_you_mean(judge.column, list(corpus.measured))}; there are "
            f"{', '.join(corpus.measured) or 'none'}"
        )
    column = corpus.read(shard, [judge.column], kept=None)[judge.column]
    try:
        values: np.ndarray = pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy()
    except pa.ArrowInvalid as error:
        raise QualityError(f"quality.judge.column: {judge.column} holds no numbers: {error}") from error
    return values


def write_asked(task: Task, inputs: Mapping[str, Path], config: dict[str, Any], context: Context) -> Done:
    """Ask the judge about the sample, and write the scores that it gave: a row per document, as `Labelled` has them."""
    section = Quality.model_validate(config)
    assert section.judge is not None
    sample, shards = choose_sample(inputs, section), shard_names(inputs["ingest"])
    sample = sample.take(np.lexsort((sample.rows, sample.shards)))
    chosen = [sample.rows[sample.shards == number] for number in range(len(shards))]
    scores, told = ask_scores(inputs, section.judge, section.sources, shards, chosen, context)
    found = replace(sample, scores=np.concatenate([np.empty(0), *scores]))
    answered = np.flatnonzero(~np.isnan(found.scores))
    found = found.take(answered[np.argsort(found.draws[answered, 1], kind="stable")])  # as `choose_sample` has them
    path = context.work / ASKED
    write_table(
        path,
        pa.table(
            {
                "shard": found.shards,
                "row": found.rows,
                "score": found.scores,
                "held": found.draws[:, 0],
                "order": found.draws[:, 1],
            }
        ),
    )
    return Done([path], told)


def _read_asked(path: Path) -> Labelled:
    shards, rows, scores, held, order = (column.to_numpy() for column in read_table(path).columns)
    return Labelled(shards, rows, scores, np.stack([held, order], axis=1))


def read_texts(inputs: Mapping[str, Path], chosen: Labelled) -> list[str]:
    """The texts of documents, in their order."""
    names = shard_names(inputs["ingest"])
    texts = [""] * len(chosen.rows)
    for number in np.unique(chosen.shards).tolist():
        places = np.flatnonzero(chosen.shards == number)
        column = read_shard(inputs, names[number], ["id", "text"]).documents["text"]
        for place, text in zip(places.tolist(), column.take(pa.array(chosen.rows[places])).to_pylist(), strict=True):
            texts[place] = text
    return texts


def train_distilled(task: Task, inputs: Mapping[str, Path], config: dict[str, Any], out: Path, work: Path) -> Done:
    """Train the classifier, commit it, and score the documents that were held out.

    Raises:
        QualityError: fewer than two documents are good, or fewer than two are not.
    """
    section = Quality.model_validate(config)
    assert section.judge is not None
    sample = choose_sample(inputs, section) if section.judge.model is None else _read_asked(work / ASKED)
    good = sample.scores >= section.judge.at_least
    parts = []
    for wanted in (True, False):
        places = np.flatnonzero(good == wanted)
        if len(places) < 2:
            raise QualityError(
                f"quality: of {len(good):,} documents that the judge scored, {len(places)} have "
                f"{'at least' if wanted else 'less than'} {section.judge.at_least:g}, too few to learn from; change "
                "judge.at_least, or let it judge more documents"
            )
        parts.append([places[some] for some in split_draws(sample.draws[places], HELD_OUT, section.sample)])
    learnt, held_out = (np.sort(np.concatenate(some)) for some in zip(*parts, strict=True))
    texts = read_texts(inputs, sample)
    own = [texts[place] for place in learnt]
    name, content = _learn(section, own, good[learnt], work)
    with atomic_write(out / name) as sink:
        sink.write(content)
    sha256 = hashlib.sha256(content).hexdigest()
    made = {"path": str(out / name), "sha256": sha256}
    score = load_distilled(section, {DISTILLED: made, **embedding_files(section)})
    scores = score(pa.array([texts[place] for place in held_out], pa.large_string()))
    return Done(
        [out / name],
        {
            "path": str(out / name),
            "sha256": sha256,
            "sample": len(good),
            "good": int(good.sum()),
            "learnt": len(learnt),
            "held_out_good": good[held_out].tolist(),
            "held_out_scores": scores.tolist(),
        },
    )


def _learn(section: Quality, texts: Sequence[str], good: np.ndarray, work: Path) -> tuple[str, bytes]:
    """The file of a classifier: name and content."""
    if section.embedding is None:
        lines = ((bool(one), as_line(text, BY_FASTTEXT)) for one, text in zip(good, texts, strict=True))
        return FASTTEXT_FILE, train(lines, BY_FASTTEXT, section.key_seed, work if is_local(work) else None)
    linear = needed("sklearn.linear_model").LogisticRegression(max_iter=MOST_ITERATIONS)
    linear.fit(load_embedder(section.embedding, folder_sha256(section.embedding.path)).embed(texts), good)
    return LINEAR_FILE, json_bytes({"weights": linear.coef_[0].tolist(), "bias": float(linear.intercept_[0])})


def embedding_files(section: Quality) -> dict[str, Mapping[str, str]]:
    """The folder that gives vectors, where the classifier takes any, as `scorers.ModelFiles` has it."""
    if section.embedding is None:
        return {}
    return {EMBEDDING: {"path": section.embedding.path, "sha256": folder_sha256(section.embedding.path)}}


def load_distilled(section: Quality, models: Mapping[str, Mapping[str, str]]) -> Callable[[pa.Array], np.ndarray]:
    """The function of n texts that gives their probability of being good, float64 rounded to thousandths."""
    path, sha256 = models[DISTILLED]["path"], models[DISTILLED]["sha256"]
    if section.embedding is None:
        model = load_model(path, sha256)
        return lambda texts: score_texts(model, texts, BY_FASTTEXT)
    weights, bias = _read_linear(path, sha256)
    embedder = load_embedder(section.embedding, models[EMBEDDING]["sha256"])

    def score(texts: pa.Array) -> np.ndarray:
        raised = embedder.embed(texts.to_pylist()).astype(np.float64) @ weights + bias
        found: np.ndarray = np.round(1 / (1 + np.exp(-raised)), 3)
        return found

    return score


@lru_cache(maxsize=4)
def _read_linear(path: str, sha256: str) -> tuple[np.ndarray, float]:
    location = as_path(path)
    assert sha256_file(location) == sha256
    found = json.loads(location.read_bytes())
    return np.array(found["weights"], np.float64), float(found["bias"])


def calibrate(good: np.ndarray, scores: np.ndarray) -> list[dict[str, float]]:
    """Of each tenth of the scores that has documents: how many, their mean score, and the share that is good."""
    bins = np.minimum((scores * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
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
    """Documents by what the judge and, at a cut, the classifier say of them."""
    taken = scores >= cut
    return {
        "good_kept": int((good & taken).sum()),
        "good_dropped": int((good & ~taken).sum()),
        "other_kept": int((~good & taken).sum()),
        "other_dropped": int((~good & ~taken).sum()),
    }
