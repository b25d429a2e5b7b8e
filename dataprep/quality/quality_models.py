"""Models of the stage `quality`: training, lookup, and scores of held-out documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import as_path, is_local, sha256_file, write_bytes
from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import Columns, measure_texts
from gristmill.dataprep.documents import Inputs, write_table
from gristmill.dataprep.encoders.distil_classifier import (
    DISTILLED,
    Distilled,
    ModelFile,
    embedding_files,
    train_distilled,
)
from gristmill.dataprep.fasttext.fasttext_predict import load_model
from gristmill.dataprep.quality.classifier import as_line, check_label, epochs_of, train
from gristmill.dataprep.quality.labelled_examples import (
    choose_examples,
    open_pool,
)
from gristmill.dataprep.quality.perplexity import load_scores
from gristmill.dataprep.quality.scorers import (
    ModelFiles,
    load_language_model,
    make_measure,
)
from gristmill.dataprep.runners.tasks import Done, Result, Task, run_tasks
from gristmill.mixtures.steps.quality import Quality

CLASSIFIER_FILE = "model.bin"
HELD_OUT_FILE = "held_out.parquet"
CHARACTERS = "characters"
"""File with a row per held-out document: `good`, its CHARACTERS, and every score."""


class TrainedClassifier(TypedDict):
    """Result of training the classifier."""

    sha256: str
    training_documents: dict[str, int]
    """Documents by class, `positive` and `negative`."""
    epochs: int


@dataclass(frozen=True)
class Trained:
    """Models that the step has trained; None for those without a training.

    Attributes:
        classifier: fastText classifier of two classes.
        distilled: classifier distilled from a judge.
    """

    classifier: TrainedClassifier | None
    distilled: Distilled | None


def train_models(
    section: Quality,
    inputs: Inputs,
    merged: Inputs,
    out: Path,
    context: Context,
) -> Trained:
    """Run all trainings of the section.

    Args:
        inputs: with every annotating stage, whose columns may be a judge's scores.
        merged: inputs with merged annotations.
    """

    def run(
        name: str, train: Callable[..., Done[Result]], read: Mapping[str, Path]
    ) -> Result:
        process = partial(
            train, inputs=dict(read), section=section, out=out, work=context.work
        )
        (result,) = run_tasks(
            f"train_{name}", [Task(name)], process, context, holds_gil=True
        )
        return result

    classifier = section.classifier
    return Trained(
        run("classifier", train_classifier, merged)
        if classifier is not None and classifier.model is None
        else None,
        run(DISTILLED, train_distilled, inputs) if section.distil is not None else None,
    )


def train_classifier(
    task: Task,
    inputs: Inputs,
    section: Quality,
    out: Path,
    work: Path,
) -> Done[TrainedClassifier]:
    """Train the classifier and commit it."""
    settings = section.classifier
    seed = section.key_seed
    assert settings is not None
    pool = open_pool(inputs, settings)
    lines: dict[bool, list[str]] = {}
    order: list[tuple[int, bool, int]] = []
    for is_positive, (examples, _) in choose_examples(pool, settings, seed).items():
        lines[is_positive] = [""] * len(examples.rows)
        for places, texts in pool.read(examples):
            for place, text in zip(places.tolist(), texts, strict=True):
                lines[is_positive][place] = as_line(text, settings)
        order += [
            (key, is_positive, index)
            for index, key in enumerate(examples.order.tolist())
        ]
    # in one order, so that training alternates between the classes
    merged = ((part, lines[part][index]) for _, part, index in sorted(order))
    content = train(merged, settings, seed, work if is_local(work) else None)
    write_bytes(out / CLASSIFIER_FILE, content)
    documents = {"positive": len(lines[True]), "negative": len(lines[False])}
    sha256 = hashlib.sha256(content).hexdigest()
    epochs = epochs_of(settings, sum(documents.values()))
    return Done(
        [out / CLASSIFIER_FILE],
        {"sha256": sha256, "training_documents": documents, "epochs": epochs},
    )


def find_models(section: Quality, out: Path, trained: Trained) -> dict[str, ModelFile]:
    """Path and content hash of every scorer's model.

    Raises:
        gristmill.dataprep.quality.classifier.ClassifierError: a user's classifier lacks
            the label.
    """
    models: dict[str, ModelFile] = {}
    if section.classifier is not None:
        path = as_path(section.classifier.model or out / CLASSIFIER_FILE)
        sha256 = (
            sha256_file(path)
            if trained.classifier is None
            else trained.classifier["sha256"]
        )
        models["classifier"] = ModelFile(path=str(path), sha256=sha256)
        check_label(load_model(str(path), sha256), section.classifier)
    if trained.distilled is not None:
        models[DISTILLED] = ModelFile(
            path=trained.distilled["path"], sha256=trained.distilled["sha256"]
        )
        models.update(embedding_files(section))
    if section.perplexity is not None and section.perplexity.kenlm is not None:
        path = as_path(section.perplexity.kenlm)
        models["kenlm"] = ModelFile(path=str(path), sha256=sha256_file(path))
        # an unusable model fails before any work
        load_scores(**models["kenlm"])
    if section.perplexity is not None and section.perplexity.model is not None:
        # Without weights the loader reports what is missing.
        weights = sorted(as_path(section.perplexity.model).glob("model*.safetensors"))
        sha256 = "".join(sha256_file(path) for path in weights)
        models["language_model"] = ModelFile(
            path=str(section.perplexity.model), sha256=sha256
        )
        load_language_model(
            section.perplexity.model, sha256, section.perplexity.max_tokens
        )
    return models


def measure_held_out(
    task: Task,
    inputs: Inputs,
    section: Quality,
    models: ModelFiles,
    out: Path,
) -> Done:
    """Measure every score on the held-out documents, which no model was trained on."""
    assert section.classifier is not None
    pool = open_pool(inputs, section.classifier)
    chosen = choose_examples(pool, section.classifier, section.key_seed)
    measure_scores = make_measure(section, models)

    def measure(texts: pa.Array) -> Columns:
        lengths = pc.utf8_length(texts).to_numpy(zero_copy_only=False)
        return {CHARACTERS: lengths, **measure_scores(texts)}

    parts = []
    for good, (_, held_out) in chosen.items():
        for _, texts in pool.read(held_out):
            # Unmeasurable documents are left out here; the stage quarantines them where
            # it judges them.
            measured, _ = measure_texts(
                pa.chunked_array([pa.array(texts, pa.large_string())]), measure
            )
            parts.append(
                {"good": np.full(len(measured[section.scores[0]]), good), **measured}
            )
    columns = ("good", CHARACTERS, *section.scores)
    write_table(
        out,
        pa.table(
            {name: np.concatenate([part[name] for part in parts]) for name in columns}
        ),
    )
    return Done([out])
