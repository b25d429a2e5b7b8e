"""Stage `quality`: scores of every document, cuts by value or by rank, and the
separation of each score.

The use of a fastText classifier for quality follows DCLM (Li et al. 2024), which keeps
the best tenth. Models are trained once, on documents chosen by hash; a held-out part,
also chosen by hash, measures how well every score separates the classes. All documents
are scored first and judged when all ranks are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import measure_texts, merge_annotations, spread
from gristmill.dataprep.conservation import (
    add_counts,
    add_histograms,
    balance,
    histogram,
)
from gristmill.dataprep.documents import (
    annotate,
    judged_rows,
    read_shard,
    read_table,
    write_table,
)
from gristmill.dataprep.encoders.distil_classifier import (
    DISTILLED,
    calibrate,
    count_confusion,
    write_asked,
)
from gristmill.dataprep.jobs.tasks import (
    Done,
    Task,
    finish_task,
    read_records,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.quality.labelled_examples import draw
from gristmill.dataprep.quality.quality_models import (
    CHARACTERS,
    HELD_OUT_FILE,
    find_models,
    measure_held_out,
    trainings,
)
from gristmill.dataprep.quality.ranking import (
    ALL,
    Cuts,
    describe_cuts,
    kept_by_rank,
    rank_documents,
)
from gristmill.dataprep.quality.scorers import SCORES, ModelFiles, make_measure
from gristmill.dataprep.thresholds import count_failures, failures, first_failures
from gristmill.mixtures.steps.quality import (
    SCORE_OF_THRESHOLD,
    THRESHOLDS,
    Quality,
    QualityThresholds,
)


def area_under_curve(positive: np.ndarray, negative: np.ndarray) -> float:
    """Exact AUC: probability that a positive scores above a negative, with ties counted
    half (Mann & Whitney 1947).

    Args:
        positive: scores of the positive examples, shape (p,), p > 0.
        negative: scores of the negative examples, shape (n,), n > 0.
    """
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([positive, negative]))
    wins = ranks[: len(positive)].sum() - len(positive) * (len(positive) + 1) / 2
    return float(wins / (len(positive) * len(negative)))


def measure_cut(
    positive: np.ndarray, negative: np.ndarray, cut: float
) -> dict[str, float]:
    """Precision, recall and F1 of accepting scores of at least `cut`; precision is 1 if
    nothing is accepted.
    """
    true_positives, false_positives = (
        int((positive >= cut).sum()),
        int((negative >= cut).sum()),
    )
    precision = (
        true_positives / (true_positives + false_positives)
        if true_positives + false_positives
        else 1.0
    )
    return {
        "cut": float(cut),
        "precision": precision,
        "recall": true_positives / len(positive),
        "f1": 2 * true_positives / (true_positives + false_positives + len(positive)),
    }


def best_cut(positive: np.ndarray, negative: np.ndarray) -> dict[str, float]:
    """Cut with the highest F1 among the scores; the highest such cut if several are
    equal.
    """
    cuts = np.unique(np.concatenate([positive, negative]))
    true_positives = len(positive) - np.searchsorted(
        np.sort(positive), cuts, side="left"
    )
    false_positives = len(negative) - np.searchsorted(
        np.sort(negative), cuts, side="left"
    )
    f1 = 2 * true_positives / (true_positives + false_positives + len(positive))
    return measure_cut(
        positive, negative, float(cuts[np.flatnonzero(f1 == f1.max())[-1]])
    )


def measure_separation(
    positive: np.ndarray,
    negative: np.ndarray,
    cut: float | None,
    higher_is_better: bool,
) -> dict[str, Any]:
    """AUC, and precision and recall at the cut (None without a single cut) and at the
    best cut.

    Args:
        positive, negative: scores of good and other examples, neither empty.
        cut: the worst score that is kept.
        higher_is_better: False for perplexities, for which good documents score low.
    """
    sign = 1.0 if higher_is_better else -1.0
    at_cut = (
        None
        if cut is None
        else measure_cut(sign * positive, sign * negative, sign * cut)
    )
    cuts = {"at_cut": at_cut, "best": best_cut(sign * positive, sign * negative)}
    for measured in cuts.values():
        if measured is not None:
            measured["cut"] *= sign
    return {"auc": area_under_curve(sign * positive, sign * negative), **cuts}


BUCKETS = ("head", "middle", "tail")
"""CCNet's names for low, medium and high perplexity."""
ASK = "ask"
"""Job that asks a judge."""
TIE, BYTES = "tie", "bytes"
"""Columns in addition to the scores: the hash that orders documents of equal scores,
and the size of a text.
"""


def run(
    inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context
) -> dict[str, Any]:
    """Score every kept document, and drop documents with bad scores.

    Training reads the kept documents of the classes' sources, even if `sources` does
    not include them. Columns are the configured scores of `scorers.SCORES`, and
    `perplexity_bucket`. Reasons are the thresholds (`quality/min_quality`) and
    `quality/keep_top`. `out` also has the trained models.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `quality` section (`mixtures.steps.quality.Quality`), its
            `seed` set.

    Returns:
        `counts`; `rules`: per threshold the documents that fail it, and that fail only
        it; `scores`: column -> its `histograms` by source and, if labelled documents
        were held out, its `separation` of them (see `measure_separation`); `cuts` with
        `keep_top`: source (or `all`) -> the cut's `score`, and the documents `kept`
        `of` all; `buckets`: the same for the ends of `head` and `middle`; `ngrams`:
        documents, words and n-grams by order of the two trained n-gram models. With a
        classifier also `training_documents` by class, `epochs`, `held_out` documents,
        its `auc` on them, `length_auc`, the AUC of the text length alone (in the better
        direction), and `histogram`: source -> documents in each of 20 equal bins of
        `quality`. With `distil` also `distilled`, see `describe_agreement`; if the
        judge was asked also `asked`, `unusable` and, with two judges, `agreement`, as
        of the step `judge`.

    Raises:
        QualityError: a class has fewer than two documents.
        ClassifierError: training failed, or a user's model lacks the label.
        AskingError: the judge's answers are unavailable, or its budget is spent; all
            answers received are stored.
        ConservationError, QuarantineError: see `counts`.
    """
    section = Quality.model_validate(config)
    arguments: dict[str, Any] = {
        "inputs": merge_annotations(inputs, context),
        "config": section.model_dump(mode="json"),
    }
    trained, judge_summary = {}, _ask(section, inputs, arguments["config"], context)
    for name, train in trainings(section).items():
        # the distilled model reads the measured inputs
        read = {"inputs": dict(inputs)} if name == DISTILLED else {}
        process = partial(train, **{**arguments, **read}, out=out, work=context.work)
        (trained[name],) = run_tasks(
            f"train_{name}", [Task(name)], process, context, holds_gil=True
        )
    arguments["models"] = find_models(section, out, trained)
    tasks = shard_tasks(inputs["ingest"])
    scores = context.work / "scored"
    results = run_tasks(
        "score",
        tasks,
        partial(score_shard, **arguments, out=scores),
        context,
        holds_gil=section.perplexity is not None,
    )
    histograms = _join_histograms(result["histograms"] for result in results)
    cuts = _find_cuts(section, scores, [task.name for task in tasks])
    buckets = _find_buckets(section, scores, [task.name for task in tasks])
    judge = partial(
        judge_shard,
        inputs=arguments["inputs"],
        config=arguments["config"],
        scores=scores,
        out=out,
        cuts=cuts,
        buckets=buckets,
    )
    results = run_tasks("judge", tasks, judge, context)
    counts = balance(results, section.max_quarantined, context.stage, errors=out)
    summary: dict[str, Any] = {
        "counts": counts,
        "rules": add_counts(result["rules"] for result in results),
        "scores": {name: {"histograms": histograms[name]} for name in section.scores},
    }
    if cuts is not None:
        summary["cuts"] = describe_cuts(cuts)
    if buckets is not None:
        summary["buckets"] = {
            name: describe_cuts(cut)
            for name, cut in zip(BUCKETS, buckets, strict=False)
        }
    if "ngram" in trained:
        summary["ngrams"] = [
            {key: value for key, value in model.items() if key != "sha256"}
            for model in trained["ngram"]["models"]
        ]
    if "quality" in section.scores:
        summary["histogram"] = {
            source: [*shape["counts"][1:-2], sum(shape["counts"][-2:])]
            for source, shape in histograms["quality"].items()
        }
    if DISTILLED in trained:
        summary["distilled"] = describe_agreement(section, trained[DISTILLED], cuts)
        summary |= judge_summary
    if section.classifier is not None:
        summary["training_documents"] = trained.get("classifier", {}).get(
            "training_documents", {}
        )
        if "classifier" in trained:
            summary["epochs"] = trained["classifier"]["epochs"]
    if section.classifier is not None and section.classifier.has_classes:
        measure = partial(
            measure_held_out, **arguments, out=context.work / HELD_OUT_FILE
        )
        run_tasks("held_out", [Task("held_out")], measure, context, holds_gil=True)
        summary.update(
            _separations(
                section,
                read_table(context.work / HELD_OUT_FILE),
                cuts,
                summary["scores"],
            )
        )
        if summary["auc"] <= summary["length_auc"]:
            context.warn(
                f"{context.stage}: the classifier tells {summary['held_out']:,} "
                "held-out documents apart no "
                f"better than their length alone (AUC {summary['auc']:.3f}, length "
                f"{summary['length_auc']:.3f}); give it more or other examples"
            )
    return summary


def _ask(
    section: Quality,
    inputs: Mapping[str, Path],
    config: dict[str, Any],
    context: Context,
) -> dict[str, Any]:
    """Let the configured judge score the sample; return its part of the summary."""
    if section.judge is None or section.judge.model is None:
        return {}
    records = context.work / ASK
    records.mkdir(parents=True, exist_ok=True)
    (record,) = read_records(records, [ASK])
    write = partial(write_asked, inputs=dict(inputs), config=config, context=context)
    return finish_task(Task(ASK), write, records) if record is None else record


def score_shard(
    task: Task,
    inputs: Mapping[str, Path],
    config: dict[str, Any],
    models: ModelFiles,
    out: Path,
) -> Done:
    """Score one document shard: a row per document with its size and, if it is judged,
    its scores.
    """
    section = Quality.model_validate(config)
    read = read_shard(inputs, task.name, ["id", "source", "text"])
    documents, judged = (
        read.documents,
        pa.array(judged_rows(read.documents, read.rows, section.sources)),
    )
    measured, errors = measure_texts(
        documents["text"].take(judged), make_measure(section, models)
    )
    sources = documents["source"].take(judged).cast(pa.string()).combine_chunks()
    ties = draw(documents["id"].take(judged).to_pylist(), section.key_seed)[:, 1]
    columns = {name: spread(values, errors) for name, values in measured.items()}
    scored = pa.table(
        {
            "source": sources,
            "error": pa.array(errors, pa.string()),
            TIE: pa.array(ties),
            **columns,
        }
    )
    places = np.full(len(documents), -1, np.int64)
    places[judged.to_numpy()] = np.arange(len(judged))
    sizes = pc.binary_length(documents["text"]).cast(pa.int64())
    write_table(
        out / task.name,
        scored.take(pa.array(places, mask=places < 0)).append_column(BYTES, sizes),
    )
    shapes = {
        name: _histograms(sources, columns[name], SCORES[name].edges)
        for name in section.scores
    }
    return Done([out / task.name], {"histograms": shapes})


def judge_shard(
    task: Task,
    inputs: Mapping[str, Path],
    config: dict[str, Any],
    scores: Path,
    out: Path,
    cuts: Cuts | None,
    buckets: tuple[Cuts, Cuts] | None,
) -> Done:
    """Judge one document shard by its scores and write its annotations."""
    section = Quality.model_validate(config)
    read = read_shard(inputs, task.name, ["id", "source"])
    documents, rows = read.documents, read.rows
    judged = judged_rows(documents, rows, section.sources)
    all_scores = read_table(scores / task.name)
    scored = all_scores.take(pa.array(judged)).combine_chunks()
    columns = {
        name: scored[name].combine_chunks()
        for name in scored.column_names
        if name not in ("source", "error", TIE, BYTES)
    }
    values = {
        name: _numbers(column)
        for name, column in columns.items()
        if name in SCORE_OF_THRESHOLD.values()
    }
    no_scores = np.full(len(judged), np.nan)
    statistics = {
        score: values.get(score, no_scores) for score in SCORE_OF_THRESHOLD.values()
    }
    bounds = QualityThresholds.model_validate(
        {name: getattr(section, name) for name in THRESHOLDS}
    )
    failed = failures(statistics, {"quality": bounds})
    sources, ties = scored["source"].to_pylist(), scored[TIE].to_numpy()
    if cuts is not None:
        ranked = _numbers(columns[cuts.score])
        failed["quality/keep_top"] = ~np.isnan(ranked) & ~kept_by_rank(
            cuts, sources, ranked, ties
        )
    if buckets is not None:
        ranked = _numbers(columns["perplexity"])
        bucket_indices = sum(
            (~kept_by_rank(cut, sources, ranked, ties)).astype(np.int64)
            for cut in buckets
        )
        columns["perplexity_bucket"] = pa.array(
            np.array(BUCKETS)[bucket_indices], mask=np.isnan(ranked)
        )
    errors = scored["error"].to_pylist()
    reasons, sizes = (
        first_failures(failed, len(judged)),
        all_scores[BYTES].combine_chunks(),
    )
    table, counts = annotate(documents, rows, judged, reasons, columns, errors, sizes)
    write_table(out / task.name, table)
    return Done([out / task.name], {"counts": counts, "rules": count_failures(failed)})


def _find_cuts(section: Quality, scores: Path, shards: list[str]) -> Cuts | None:
    if section.keep_top is None:
        return None
    return _rank(section, section.ranked_by, section.keep_top, scores, shards)


def _find_buckets(
    section: Quality, scores: Path, shards: list[str]
) -> tuple[Cuts, Cuts] | None:
    """Cuts at the end of the head and of the middle."""
    if section.perplexity is None or section.perplexity.buckets is None:
        return None
    head, middle = (
        _rank(section, "perplexity", share, scores, shards)
        for share in section.perplexity.buckets
    )
    return head, middle


def _rank(
    section: Quality, score: str, share: float, scores: Path, shards: list[str]
) -> Cuts:
    def read() -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
        for shard in shards:
            table = read_table(scores / shard, ["source", score, TIE])
            values = _numbers(table[score])
            is_known = ~np.isnan(values)
            ranked = table.filter(pa.array(is_known))
            yield ranked["source"].to_pylist(), values[is_known], ranked[TIE].to_numpy()

    return rank_documents(
        read, score, SCORES[score].higher_is_better, share, section.per_source
    )


def _separations(
    section: Quality,
    held_out: pa.Table,
    cuts: Cuts | None,
    scores: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Measure each score on the held-out documents into `scores`; return the
    classifier's own figures.
    """
    good = held_out["good"].to_numpy(zero_copy_only=False).astype(bool)
    for name, summary in scores.items():
        values = _numbers(held_out[name])
        positive, negative = (
            values[in_class & ~np.isnan(values)] for in_class in (good, ~good)
        )
        if len(positive) and len(negative):
            cut, higher_is_better = (
                _single_cut(section, name, cuts),
                SCORES[name].higher_is_better,
            )
            summary["separation"] = measure_separation(
                positive, negative, cut, higher_is_better
            )
    lengths = _numbers(held_out[CHARACTERS])
    by_length = area_under_curve(lengths[good], lengths[~good])
    return {
        "auc": scores["quality"]["separation"]["auc"],
        "length_auc": max(by_length, 1.0 - by_length),
        "held_out": len(held_out),
    }


def describe_agreement(
    section: Quality, trained: Mapping[str, Any], cuts: Cuts | None
) -> dict[str, Any]:
    """Agreement of a classifier with the judge that it was distilled from, on held-out
    documents.

    Returns:
        `sample`: documents that the judge scored, of which `good` are good and `learnt`
        were trained on; on the held-out documents `held_out`: `auc`, `at_cut`
        (precision, recall and F1 at the configured cut, or at 0.5), `best`, `confusion`
        at the cut, and `calibration` (see `distilled.calibrate`).
    """
    good, scores = (
        np.array(trained["held_out_good"], bool),
        np.array(trained["held_out_scores"], np.float64),
    )
    configured = _single_cut(section, "quality", cuts)
    cut = 0.5 if configured is None else configured
    return {
        **{name: trained[name] for name in ("sample", "good", "learnt")},
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
    if cuts is not None and cuts.score == score and not cuts.per_source and cuts.found:
        values.append(cuts.found[ALL].score)
    if not values:
        return None
    return max(values) if SCORES[score].higher_is_better else min(values)


def _numbers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Column as float64, NaN for null."""
    values: np.ndarray = pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy(
        zero_copy_only=False
    )
    return values


def _histograms(
    sources: pa.Array, scores: pa.Array, edges: tuple[float, ...]
) -> dict[str, Any]:
    values, names = _numbers(scores), np.array(sources.to_pylist(), object)
    return {
        source: histogram(values[names == source], list(edges))
        for source in sorted(set(names.tolist()))
    }


def _join_histograms(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    histograms = list(parts)
    names = dict.fromkeys(name for part in histograms for name in part)
    return {
        name: dict(sorted(add_histograms(part[name] for part in histograms).items()))
        for name in names
    }
