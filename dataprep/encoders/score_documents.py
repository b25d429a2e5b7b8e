"""Stage `annotate` with a model: write its scores as columns, and drop documents by
thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import Columns, Measure, measure_texts
from gristmill.dataprep.documents import Inputs, read_shard
from gristmill.dataprep.encoders.document_scores import (
    Announced,
    ReadCounts,
    Reader,
    Score,
    Scored,
    announce,
    count_read,
    describe_reader,
    is_fasttext,
    load_scorer,
)
from gristmill.dataprep.encoders.forward_backends import network_packages
from gristmill.dataprep.encoders.model_folders import (
    ModelFolderError,
    check_installed,
    folder_sha256,
    model_folder,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.thresholds import (
    MeasuredShard,
    MeasuredSummary,
    bounds_of,
    failures,
    first_failures,
    measured_shard,
    summarize,
)
from gristmill.mixtures.schema.encoder_settings import ScoringModel
from gristmill.mixtures.steps.own_steps import Annotate
from gristmill.mixtures.yaml_text import unknown_name

READ = ("(tokens)", "(windows)", "(whole)")
"""Counts per text beside its columns; names of columns cannot have parentheses."""


@dataclass(frozen=True)
class ScoreSummary(MeasuredSummary):
    """Summary of the scores.

    Attributes:
        reader: the model, and the amount of text that it read.
    """

    reader: Reader


class ScoredShard(MeasuredShard):
    """Result of scoring a shard."""

    read: ReadCounts


def run(inputs: Inputs, section: Annotate, out: Path, context: Context) -> ScoreSummary:
    """Score every kept document with a model, and drop documents by the thresholds.

    Raises:
        ModelFolderError: the model does not exist, or a threshold bounds a column that
            it does not have.
        ConservationError, QuarantineError: see `counts`.
    """
    model = _model(section)
    check_bounds(section, announce(model))
    sha256 = folder_sha256(model.path)
    # fail before any work; threads of this process share the model
    load_scorer(model, sha256)
    results = run_tasks(
        "annotate",
        shard_tasks(inputs["ingest"]),
        partial(score_shard, inputs=inputs, section=section, sha256=sha256, out=out),
        context,
    )
    measured = summarize(results, section.max_quarantined, context.stage, out)
    reader = describe_reader(model, sha256, [result["read"] for result in results])
    return ScoreSummary(**vars(measured), reader=reader)


def _model(section: Annotate) -> ScoringModel:
    assert section.model is not None
    return section.model


def check_bounds(section: Annotate, announced: Announced) -> None:
    """Raise ModelFolderError if a threshold bounds something other than a numeric
    column of the model.
    """
    for bound in bounds_of(section):
        if bound.statistic not in announced.numbers:
            raise ModelFolderError(
                f"{bound.key}: {_model(section).path} has no column of numbers "
                f"{unknown_name(bound.statistic, announced.numbers, 'it has')}"
            )


def check_packages(model: ScoringModel) -> None:
    """Raise ModelFolderError if a package that the model needs is not installed."""
    if not is_fasttext(model):
        check_installed(*network_packages(model_folder(model.path), model))


def score_shard(
    task: ShardTask,
    inputs: Inputs,
    section: Annotate,
    sha256: str,
    out: Path,
) -> Done[ScoredShard]:
    """Score one document shard and write its annotations."""
    model = _model(section)
    announced = announce(model)
    score = load_scorer(model, sha256)
    shard = read_shard(inputs, task.name, ["id", "source", "text"], section.sources)
    texts = shard.judged_documents["text"]
    measured, errors = measure_texts(texts, as_measure(announced, score))
    numbers = {name: measured[name] for name in announced.numbers}
    failed = failures(numbers, {"annotate": section})
    reasons = first_failures(failed, errors.count(None))
    columns = {name: measured[name] for name in announced.columns}
    counts = shard.write_measured(out / task.name, reasons, columns, errors)
    return Done(
        [out / task.name],
        {
            **measured_shard(counts, failed, numbers),
            "read": count_read(*(measured[name] for name in READ)),
        },
    )


def as_measure(announced: Announced, score: Score) -> Measure:
    """Make a measure of the model's columns and the counts READ for batches of
    texts.
    """
    no_scores = Scored(
        np.zeros((0, len(announced.numbers))),
        (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool)),
    )

    def measure(texts: pa.Array) -> Columns:
        scores = score(texts) if len(texts) else no_scores
        columns = dict(zip(announced.numbers, scores.numbers.T, strict=True))
        if announced.likeliest is not None:
            columns[announced.likeliest] = pa.array(scores.likeliest, pa.string())
        return columns | dict(zip(READ, scores.counts, strict=True))

    return measure
