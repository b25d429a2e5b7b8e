"""The stage `quality`: a classifier learns to tell the positive sources from the negative ones, and scores documents.

The use of a fastText classifier for quality follows DCLM (Li et al. 2024). It is trained once, on documents chosen
by hash; a held-out part, chosen by hash too, measures how well it separates the classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.classifier import area_under_curve, normalise, score, train
from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, check_conservation, check_quarantine
from gristmill.dataprep.documents import annotate, judged_rows, kept_rows, read_documents, shard_names, write_table
from gristmill.dataprep.engine import Done, Task, run_tasks
from gristmill.dataprep.files import atomic_write, is_local
from gristmill.dataprep.measuring import measure_texts, spread
from gristmill.dataprep.models import load_model
from gristmill.mixtures.quality import Classifier, Quality

HISTOGRAM_BINS = 20
MODEL_FILE = "model.bin"


class QualityError(ValueError):
    """The classifier has nothing to learn from."""


@dataclass(frozen=True)
class Examples:
    """Documents of one class in the order in which they are used: row `rows[i]` of shard `shards[i]`."""

    shards: np.ndarray
    """int64 of shape (n,): positions in the list of shards."""
    rows: np.ndarray
    """int64 of shape (n,)."""
    order: np.ndarray
    """uint64 of shape (n,), ascending: the hash that they are ordered by."""


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Train the classifier, then measure `quality` (probability of the positive class) of every kept document.

    Training reads the kept documents of the classes' sources, whether or not `sources` has them judged. The reason
    to drop is `quality` (below `threshold`). Beside the annotations, `out` holds the model.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `quality` section (`mixtures.quality.Quality`), its `seed` set.

    Returns:
        `counts`, `auc` on `held_out` documents, `training_documents` by class, and `histogram`: source -> number of
        documents in each of 20 equal bins of the score.

    Raises:
        QualityError: a class has fewer than two documents, or a source is in both classes.
        ClassifierError: training failed.
        ConservationError, QuarantineError: see `counts`.
    """
    section = Quality.model_validate(config)
    shared: dict[str, Any] = {"inputs": dict(inputs), "config": section.model_dump(mode="json"), "out": out}
    learn = partial(train_model, **shared, work=context.work)
    (trained,) = run_tasks("train", [Task("model")], learn, context)
    tasks = [Task(shard) for shard in shard_names(inputs["ingest"])]
    results = run_tasks("score", tasks, partial(score_shard, **shared, sha256=trained["sha256"]), context)
    counts = add_counts(result["counts"] for result in results)
    check_conservation(counts, context.stage)
    check_quarantine(counts, section.max_quarantined, context.stage)
    return {
        "counts": counts,
        "auc": trained["auc"],
        "held_out": trained["held_out"],
        "training_documents": trained["training_documents"],
        "histogram": _add_bins(result["histogram"] for result in results),
    }


def train_model(task: Task, inputs: Mapping[str, Path], config: dict[str, Any], out: Path, work: Path) -> Done:
    """Train the classifier, commit it, and measure it on the held-out documents."""
    section = Quality.model_validate(config)
    seed, settings = section.seed or 0, section.classifier
    shards = shard_names(inputs["ingest"])
    training, held_out = {}, {}
    for good, examples in choose_examples(inputs, shards, settings, seed).items():
        training[good], held_out[good] = examples
    lines = {good: _read_lines(inputs, shards, examples, settings) for good, examples in training.items()}
    order = {good: examples.order for good, examples in training.items()}
    content = train(_merge(lines, order), settings, seed, work if is_local(work) else None)
    with atomic_write(out / MODEL_FILE) as sink:
        sink.write(content)
    sha256 = hashlib.sha256(content).hexdigest()
    model = load_model(str(out / MODEL_FILE), sha256)
    scores = {
        good: score(model, _read_lines(inputs, shards, examples, settings)) for good, examples in held_out.items()
    }
    result = {
        "sha256": sha256,
        "auc": area_under_curve(scores[True], scores[False]),
        "held_out": len(scores[True]) + len(scores[False]),
        "training_documents": {"positive": len(lines[True]), "negative": len(lines[False])},
    }
    return Done([out / MODEL_FILE], result)


def score_shard(task: Task, inputs: Mapping[str, Path], config: dict[str, Any], out: Path, sha256: str) -> Done:
    """Score one document shard and write its annotations."""
    section = Quality.model_validate(config)
    documents = read_documents(inputs, task.name, ["id", "source", "text"])
    rows = kept_rows(inputs, task.name)
    judged = judged_rows(documents, rows, section.sources)
    model = load_model(str(out / MODEL_FILE), sha256)

    def measure(texts: pa.Array) -> dict[str, np.ndarray]:
        lines = [normalise(text, section.classifier.max_characters) for text in texts.to_pylist()]
        return {"quality": score(model, lines)}

    measured, errors = measure_texts(documents["text"].take(judged), measure)
    column = spread(measured["quality"], errors)
    threshold = -1.0 if section.threshold is None else section.threshold
    reasons = ["quality" if value is not None and value < threshold else None for value in column.to_pylist()]
    table, counts = annotate(documents, rows, judged, reasons, {"quality": column}, errors)
    write_table(out / task.name, table)
    sources = documents["source"].take(pa.array(judged)).cast(pa.string())
    return Done([out / task.name], {"counts": counts, "histogram": _count_bins(sources, column)})


def choose_examples(
    inputs: Mapping[str, Path], shards: Sequence[str], section: Classifier, seed: int
) -> dict[bool, tuple[Examples, Examples]]:
    """Choose the documents to learn from and those to measure with: whether positive -> (training, held out).

    Raises:
        QualityError: a class has fewer than two documents, or a source is in both classes.
    """
    both = sorted(set(section.positive) & set(section.negative))
    if both:
        raise QualityError(f"quality: {', '.join(both)} is both positive and negative; leave it in one class")
    classes = {True: section.positive, False: section.negative}
    found: dict[bool, list[tuple[int, np.ndarray, np.ndarray]]] = {True: [], False: []}
    for number, shard in enumerate(shards):
        documents, rows = read_documents(inputs, shard, ["id", "source"]), kept_rows(inputs, shard)
        for good, sources in classes.items():
            members = judged_rows(documents, rows, sources)
            found[good].append((number, members, draw(documents["id"].take(pa.array(members)).to_pylist(), seed)))
    return {good: _split(found[good], classes[good], section, good) for good in classes}


def draw(ids: Sequence[bytes], seed: int) -> np.ndarray:
    """Two uniform 64-bit numbers per document, from the seed and its id alone: uint64 of shape (n, 2)."""
    key = seed.to_bytes(16, "little", signed=True)
    digests = b"".join(hashlib.blake2b(identity, digest_size=16, key=key).digest() for identity in ids)
    return np.frombuffer(digests, "<u8").reshape(-1, 2)


def split_draws(draws: np.ndarray, holdout: float, max_documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Split at least two documents into those to learn from and those held out: neither is empty.

    Args:
        draws: uint64 of shape (n, 2): the first decides which part a document is in, the second the order.
        holdout: share that is held out.
        max_documents: at most so many in each part, the first in the order.

    Returns:
        positions of the training and of the held-out documents, each in the order.
    """
    order = np.lexsort((draws[:, 0], draws[:, 1]))
    held = draws[order, 0] < np.uint64(holdout * 2.0**64)
    if held.all() or not held.any():
        held[-1] = not held[-1]
    return order[~held][:max_documents], order[held][:max_documents]


def _split(
    found: list[tuple[int, np.ndarray, np.ndarray]], sources: Sequence[str], section: Classifier, good: bool
) -> tuple[Examples, Examples]:
    draws = np.concatenate([drawn for _, _, drawn in found]) if found else np.empty((0, 2), np.uint64)
    if len(draws) < 2:
        name = "positive" if good else "negative"
        raise QualityError(
            f"quality: the {name} sources ({', '.join(sources)}) have {len(draws)} documents left, at least 2 are "
            f"needed; name other sources as `{name}:`, or loosen the stages before"
        )
    shards = np.concatenate([np.full(len(rows), number, np.int64) for number, rows, _ in found])
    rows = np.concatenate([rows for _, rows, _ in found])
    parts = split_draws(draws, section.holdout, section.max_documents)
    training, held_out = (Examples(shards[part], rows[part], draws[part, 1]) for part in parts)
    return training, held_out


def _read_lines(
    inputs: Mapping[str, Path], shards: Sequence[str], examples: Examples, section: Classifier
) -> list[str]:
    """The normalised texts of some examples, in their order."""
    lines = [""] * len(examples.rows)
    for number in np.unique(examples.shards):
        places = np.flatnonzero(examples.shards == number)
        texts = read_documents(inputs, shards[number], ["text"])["text"].take(pa.array(examples.rows[places]))
        for place, text in zip(places, texts, strict=True):
            lines[place] = normalise(text.as_py(), section.max_characters)
    return lines


def _merge(lines: Mapping[bool, Sequence[str]], order: Mapping[bool, np.ndarray]) -> Iterator[tuple[bool, str]]:
    """Both classes in one order, so that neither is learnt before the other."""
    merged = [(key, good, place) for good in lines for place, key in enumerate(order[good].tolist())]
    for _, good, place in sorted(merged):
        yield good, lines[good][place]


def _count_bins(sources: pa.ChunkedArray, scores: pa.Array) -> dict[str, list[int]]:
    bins: dict[str, list[int]] = {}
    for source in sorted(pc.unique(sources).to_pylist()):
        values = scores.filter(pc.equal(sources, source).combine_chunks()).drop_null().to_numpy(zero_copy_only=False)
        bins[source] = np.histogram(values, HISTOGRAM_BINS, (0.0, 1.0))[0].tolist()
    return bins


def _add_bins(parts: Iterator[dict[str, list[int]]]) -> dict[str, list[int]]:
    total: dict[str, list[int]] = {}
    for part in parts:
        for source, bins in part.items():
            before = total.get(source, [0] * HISTOGRAM_BINS)
            total[source] = [a + b for a, b in zip(before, bins, strict=True)]
    return total
