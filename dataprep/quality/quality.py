"""Stage `quality`: scores of every document, cuts by value or by rank, and the
separation of each score.

The use of a fastText classifier for quality follows DCLM (Li et al. 2024), which keeps
the best tenth. Models are trained once, on documents chosen by hash; a held-out part,
also chosen by hash, measures how well every score separates the classes. All documents
are scored first and judged when all ranks are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NotRequired

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import TypedDict

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import measure_texts, merge_annotations
from gristmill.dataprep.conservation import (
    Counted,
    Counts,
    Histograms,
    RuleCounts,
    add_counts,
    add_histograms,
    balance,
    histogram,
)
from gristmill.dataprep.documents import (
    Inputs,
    as_numbers,
    positions,
    read_shard,
    read_table,
    spread,
    write_table,
)
from gristmill.dataprep.encoders.distil_classifier import (
    Distilled,
    calibrate,
    count_confusion,
    write_asked,
)
from gristmill.dataprep.llm.labels import JudgeReport
from gristmill.dataprep.llm.request_counts import RequestCounts
from gristmill.dataprep.quality.labelled_examples import draw
from gristmill.dataprep.quality.quality_models import (
    CHARACTERS,
    HELD_OUT_FILE,
    find_models,
    measure_held_out,
    train_models,
)
from gristmill.dataprep.quality.ranking import (
    ALL,
    Cuts,
    DescribedCut,
    kept_by_rank,
    rank_documents,
)
from gristmill.dataprep.quality.scorers import SCORES, ModelFiles, make_measure
from gristmill.dataprep.quality.separation import (
    DistilledAgreement,
    Separation,
    area_under_curve,
    measure_separation,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    Task,
    finish_task,
    read_records,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.thresholds import count_failures, failures, first_failures
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.quality import (
    SCORE_OF_THRESHOLD,
    THRESHOLDS,
    Quality,
    QualityThresholds,
)

BUCKETS = ("head", "middle", "tail")
"""CCNet's names for low, medium and high perplexity."""
ASK = "ask"
"""Job that asks a judge."""
TIE, BYTES = "tie", "bytes"
"""Columns in addition to the scores: the hash that orders documents of equal scores,
and the size of a text.
"""


class ScoreReport(TypedDict):
    """Distribution of a score: its histogram by source and, if labelled documents were
    held out, its separation of these.
    """

    histograms: Histograms
    separation: NotRequired[Separation]


@dataclass(frozen=True)
class QualitySummary:
    """Summary of the scores and the judgement; what does not apply is None.

    Attributes:
        counts: documents by outcome.
        rules: threshold -> documents that fail it (`failing`), and only it (`only`).
        scores: column -> its distribution.
        cuts: with `keep_top`, source (or `all`) -> cut.
        buckets: the same for the ends of `head` and `middle`.
        histogram: of a classifier, source -> documents in each of 20 equal bins of
            `quality`.
        distilled: agreement with the judge that the classifier was distilled from.
        asked: requests and costs of the judge; None without one.
        unusable: documents without a usable answer.
        training_documents: of a classifier, number by class.
        epochs: passes of its training.
        held_out: number of held-out documents.
        auc: of the classifier on them.
        length_auc: of the text length alone, in the better direction.
    """

    counts: Counts
    rules: RuleCounts
    scores: Mapping[str, ScoreReport]
    cuts: Mapping[str, DescribedCut] | None = None
    buckets: Mapping[str, Mapping[str, DescribedCut]] | None = None
    histogram: Mapping[str, Sequence[int]] | None = None
    distilled: DistilledAgreement | None = None
    asked: Sequence[RequestCounts] | None = None
    unusable: int | None = None
    training_documents: Mapping[str, int] | None = None
    epochs: int | None = None
    held_out: int | None = None
    auc: float | None = None
    length_auc: float | None = None


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> QualitySummary:
    """Score every kept document, and drop documents with bad scores.

    Training reads the kept documents of the classes' sources, even if `sources` does
    not include them. Columns are the configured scores of `scorers.SCORES`, and
    `perplexity_bucket`. Reasons are the thresholds (`quality/min_quality`) and
    `quality/keep_top`. `out` also has the trained models.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `quality` section (`mixtures.steps.quality.Quality`), its
            `seed` set.

    Raises:
        QualityError: a class has fewer than two documents.
        ClassifierError: training failed, or a user's model lacks the label.
        AskingError: the judge's answers are unavailable, or its budget is spent; all
            answers received are stored.
        ConservationError, QuarantineError: see `counts`.
    """
    section = Quality.model_validate(config)
    merged = merge_annotations(inputs, context)
    judge_report = _ask(section, inputs, context)
    trained = train_models(section, inputs, merged, out, context)
    models = find_models(section, out, trained)
    tasks = shard_tasks(inputs["ingest"])
    scores = context.work / "scored"
    scored = run_tasks(
        "score",
        tasks,
        partial(score_shard, inputs=merged, section=section, models=models, out=scores),
        context,
        holds_gil=section.perplexity is not None,
    )
    histograms = {
        name: dict(
            sorted(
                add_histograms(shard["histograms"][name] for shard in scored).items()
            )
        )
        for name in section.scores
    }
    rank = partial(_rank, section, [scores / task.name for task in tasks])
    cuts: Cuts | None = None
    buckets: tuple[Cuts, Cuts] | None = None
    if section.keep_top is not None:
        cuts = rank(section.ranked_by, section.keep_top)
    if section.perplexity is not None and section.perplexity.buckets is not None:
        head, middle = section.perplexity.buckets
        buckets = rank("perplexity", head), rank("perplexity", middle)
    judge = partial(
        judge_shard,
        inputs=merged,
        section=section,
        scores=scores,
        out=out,
        cuts=cuts,
        buckets=buckets,
    )
    results = run_tasks("judge", tasks, judge, context)
    summary = QualitySummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        add_counts(result["rules"] for result in results),
        {name: ScoreReport(histograms=histograms[name]) for name in section.scores},
        cuts=None if cuts is None else cuts.by_group,
        buckets=None
        if buckets is None
        else {name: cut.by_group for name, cut in zip(BUCKETS, buckets, strict=False)},
        histogram={
            source: [*shape["counts"][1:-2], sum(shape["counts"][-2:])]
            for source, shape in histograms["quality"].items()
        }
        if "quality" in section.scores
        else None,
        distilled=None
        if trained.distilled is None
        else describe_agreement(section, trained.distilled, cuts),
        asked=judge_report.get("asked"),
        unusable=judge_report.get("unusable"),
    )
    if section.classifier is None:
        return summary
    if trained.classifier is None:
        summary = replace(summary, training_documents={})
    else:
        summary = replace(
            summary,
            training_documents=trained.classifier["training_documents"],
            epochs=trained.classifier["epochs"],
        )
    if not section.classifier.has_classes:
        return summary
    held_out = context.work / HELD_OUT_FILE
    measure = partial(
        measure_held_out, inputs=merged, section=section, models=models, out=held_out
    )
    run_tasks("held_out", [Task("held_out")], measure, context, holds_gil=True)
    return _add_separations(summary, section, read_table(held_out), cuts, context)


def _ask(section: Quality, inputs: Inputs, context: Context) -> JudgeReport:
    """Let the configured judge score the sample."""
    if section.judge is None or section.judge.model is None:
        return {}
    records = context.work / ASK
    records.mkdir(parents=True, exist_ok=True)
    record: JudgeReport | None = read_records(records, [ASK]).get(ASK)
    write = partial(write_asked, inputs=inputs, section=section, context=context)
    return finish_task(Task(ASK), write, records) if record is None else record


class ScoredShard(TypedDict):
    """Result of scoring a shard."""

    histograms: dict[str, Histograms]
    """Score -> source -> histogram."""


class JudgedShard(Counted):
    """Result of judging a shard by its scores."""

    rules: RuleCounts
    """Threshold -> documents that fail it (`failing`), and only it (`only`)."""


def score_shard(
    task: ShardTask,
    inputs: Inputs,
    section: Quality,
    models: ModelFiles,
    out: Path,
) -> Done[ScoredShard]:
    """Score one document shard: a row per document with its size and, if it is judged,
    its scores.
    """
    shard = read_shard(inputs, task.name, ["id", "source", "text"], section.sources)
    judged = shard.judged_documents
    measured, errors = measure_texts(judged["text"], make_measure(section, models))
    sources = judged["source"].cast(pa.string()).combine_chunks()
    ties = draw(judged["id"].to_pylist(), section.key_seed)[:, 1]
    columns = {name: spread(values, errors) for name, values in measured.items()}
    scored = pa.table(
        {
            "source": sources,
            "error": pa.array(errors, pa.string()),
            TIE: ties,
            **columns,
        }
    )
    places = positions(np.arange(len(shard.documents)), shard.judged)
    sizes = pc.binary_length(shard.documents["text"]).cast(pa.int64())
    write_table(out / task.name, scored.take(places).append_column(BYTES, sizes))
    source_names = np.array(sources.to_pylist(), object)
    shapes: dict[str, Histograms] = {}
    for name in section.scores:
        values, edges = as_numbers(columns[name]), list(SCORES[name].edges)
        shapes[name] = {
            source: histogram(values[source_names == source], edges)
            for source in sorted(set(source_names))
        }
    return Done([out / task.name], {"histograms": shapes})


def judge_shard(
    task: ShardTask,
    inputs: Inputs,
    section: Quality,
    scores: Path,
    out: Path,
    cuts: Cuts | None,
    buckets: tuple[Cuts, Cuts] | None,
) -> Done[JudgedShard]:
    """Judge one document shard by its scores and write its annotations."""
    shard = read_shard(inputs, task.name, ["id", "source"], section.sources)
    all_scores = read_table(scores / task.name)
    scored = all_scores.take(shard.judged).combine_chunks()
    columns = {
        name: scored[name].combine_chunks()
        for name in scored.column_names
        if name not in ("source", "error", TIE, BYTES)
    }
    values = {
        name: as_numbers(column)
        for name, column in columns.items()
        if name in SCORE_OF_THRESHOLD.values()
    }
    no_scores = np.full(len(scored), np.nan)
    statistics = {
        score: values.get(score, no_scores) for score in SCORE_OF_THRESHOLD.values()
    }
    bounds = QualityThresholds.model_validate(
        {name: getattr(section, name) for name in THRESHOLDS}
    )
    failed = failures(statistics, {"quality": bounds})
    sources = scored["source"].to_pylist()
    ties = scored[TIE].to_numpy()
    if cuts is not None:
        ranked = as_numbers(columns[cuts.score])
        failed["quality/keep_top"] = ~np.isnan(ranked) & ~kept_by_rank(
            cuts, sources, ranked, ties
        )
    if buckets is not None:
        ranked = as_numbers(columns["perplexity"])
        bucket_indices = sum(
            (~kept_by_rank(cut, sources, ranked, ties)).astype(np.int64)
            for cut in buckets
        )
        columns["perplexity_bucket"] = pa.array(
            np.array(BUCKETS)[bucket_indices], mask=np.isnan(ranked)
        )
    errors = scored["error"].to_pylist()
    reasons = first_failures(failed, len(scored))
    sizes = all_scores[BYTES].combine_chunks()
    counts = shard.write(out / task.name, reasons, columns, errors, sizes)
    return Done([out / task.name], {"counts": counts, "rules": count_failures(failed)})


def _rank(
    section: Quality, scored_shards: Sequence[Path], score: str, share: float
) -> Cuts:
    def read() -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
        for shard in scored_shards:
            table = read_table(shard, ["source", score, TIE])
            values = as_numbers(table[score])
            is_known = ~np.isnan(values)
            ranked = table.filter(is_known)
            yield ranked["source"].to_pylist(), values[is_known], ranked[TIE].to_numpy()

    return rank_documents(
        read(), score, SCORES[score].higher_is_better, share, section.per_source
    )


def _add_separations(
    summary: QualitySummary,
    section: Quality,
    held_out: pa.Table,
    cuts: Cuts | None,
    context: Context,
) -> QualitySummary:
    """Add each score's separation of held-out documents, and warn of a classifier that
    only learned their length.
    """
    good = held_out["good"].to_numpy()
    for name, report in summary.scores.items():
        values = as_numbers(held_out[name])
        positive, negative = (
            values[in_class & ~np.isnan(values)] for in_class in (good, ~good)
        )
        if len(positive) and len(negative):
            cut = _single_cut(section, name, cuts)
            higher_is_better = SCORES[name].higher_is_better
            report["separation"] = measure_separation(
                positive, negative, cut, higher_is_better
            )
    lengths = as_numbers(held_out[CHARACTERS])
    by_length = area_under_curve(lengths[good], lengths[~good])
    auc = summary.scores["quality"]["separation"]["auc"]
    length_auc = max(by_length, 1.0 - by_length)
    if auc <= length_auc:
        context.warn(
            f"{context.stage}: the classifier tells {len(held_out):,} held-out "
            "documents apart no better than their length alone (AUC "
            f"{auc:.3f}, length {length_auc:.3f}); give it more or other examples"
        )
    return replace(summary, held_out=len(held_out), auc=auc, length_auc=length_auc)


def describe_agreement(
    section: Quality, trained: Distilled, cuts: Cuts | None
) -> DistilledAgreement:
    """Measure the agreement at the configured cut, or at 0.5."""
    good = np.array(trained["held_out_good"], bool)
    scores = np.array(trained["held_out_scores"], np.float64)
    configured = _single_cut(section, "quality", cuts)
    cut = 0.5 if configured is None else configured
    return {
        "sample": trained["sample"],
        "good": trained["good"],
        "learnt": trained["learnt"],
        "held_out": len(good),
        **measure_separation(scores[good], scores[~good], cut, True),
        "confusion": count_confusion(good, scores, cut),
        "calibration": calibrate(good, scores),
    }


def _single_cut(section: Quality, score: str, cuts: Cuts | None) -> float | None:
    """Worst value of a score that is kept; None without a single cut, as with one per
    source.
    """
    bounds = [
        getattr(section, name)
        for name in THRESHOLDS
        if SCORE_OF_THRESHOLD[name] == score
    ]
    values = [bound for bound in bounds if bound is not None]
    if (
        cuts is not None
        and cuts.score == score
        and not cuts.per_source
        and cuts.by_group
    ):
        values.append(cuts.by_group[ALL].score)
    if not values:
        return None
    return max(values) if SCORES[score].higher_is_better else min(values)
