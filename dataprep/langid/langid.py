"""Stage `langid`: the language of each document, by a fastText model.

The model is lid.176 (Joulin et al. 2016) or another one whose labels are languages;
`language_codes` normalises labels. Thresholds are used as in CCNet (Wenzek et al. 2020)
and FineWeb (Penedo et al. 2024).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.files import sha256_file
from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import measure_texts
from gristmill.dataprep.conservation import (
    SHARE_EDGES,
    Counted,
    Counts,
    Histograms,
    add_counts,
    add_histograms,
    balance,
    histogram,
)
from gristmill.dataprep.documents import Inputs, read_shard
from gristmill.dataprep.fasttext.fasttext_models import find_model
from gristmill.dataprep.fasttext.fasttext_predict import Predictor, lines_of, load_model
from gristmill.dataprep.fasttext.fasttext_words import Lines
from gristmill.dataprep.langid.check_languages import (
    LanguageError,
    Wanted,
    check_labels,
    check_languages,
    wanted_languages,
)
from gristmill.dataprep.langid.language_codes import Language, best_match, parse_label
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    run_tasks,
    shard_tasks,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.langid import LanguageId

PIECES = 4
"""Pieces of a document that `sample: spread` reads."""


class IdentifiedShard(Counted):
    """Result of identifying the languages of a shard; see `LanguageSummary`."""

    languages: dict[str, int]
    languages_kept: dict[str, int]
    parts: dict[str, dict[str, int]]
    histograms: Histograms


@dataclass(frozen=True)
class LanguageSummary:
    """Summary of the languages.

    Attributes:
        counts: documents by outcome.
        languages: top language -> documents.
        languages_kept: of these, the kept ones.
        parts: key of a mapping `keep` -> reason -> documents.
        histograms: of `language_score`.
    """

    counts: Counts
    languages: Mapping[str, int]
    languages_kept: Mapping[str, int]
    parts: Mapping[str, Mapping[str, int]]
    histograms: Histograms


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> LanguageSummary:
    """Measure `language` and `language_score` of every kept document, and drop unwanted
    documents.

    A model whose labels name scripts adds a column `script`.

    Reasons: `language` (the top language is not in `keep`), `language_score` (its score
    is below the threshold).

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `langid` section (`mixtures.steps.langid.LanguageId`).

    Raises:
        ModelError: the language model is unavailable.
        LanguageError: the model does not know a language of `keep`.
        ConservationError, QuarantineError: see `counts`.
    """
    section = LanguageId.model_validate(config)
    path = find_model(section.model)  # fails before any work, and downloads only once
    sha256 = sha256_file(path)
    model = load_model(str(path), sha256)
    labels = model.labels
    check_labels(section, labels, path.name)
    check_languages(
        wanted_languages(section),
        [section.labels.get(label, label) for label in labels],
        path.name,
    )
    results = run_tasks(
        "langid",
        shard_tasks(inputs["ingest"]),
        partial(
            identify_shard,
            inputs=inputs,
            section=section.model_copy(update={"model": str(path)}),
            out=out,
            sha256=sha256,
        ),
        context,
    )
    return LanguageSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        add_counts(result["languages"] for result in results),
        add_counts(result["languages_kept"] for result in results),
        add_counts(result["parts"] for result in results),
        add_histograms(result["histograms"] for result in results),
    )


def identify_shard(
    task: ShardTask,
    inputs: Inputs,
    section: LanguageId,
    out: Path,
    sha256: str,
) -> Done[IdentifiedShard]:
    """Identify the languages of one document shard and write its annotations."""
    shard = read_shard(inputs, task.name, ["id", "source", "text"], section.sources)
    model = load_model(str(find_model(section.model)), sha256)
    thresholds = wanted_languages(section)
    measured, errors = measure_texts(
        shard.judged_documents["text"], partial(measure, model, section)
    )
    scripts = measured.pop("script")
    languages = [
        Language(*language)
        for language in zip(
            measured["language"].tolist(), scripts.tolist(), strict=True
        )
    ]
    verdicts = [
        judge(language, score, thresholds)
        for language, score in zip(
            languages, measured["language_score"].tolist(), strict=True
        )
    ]
    if any(
        parse_label(section.labels.get(label, label)).script for label in model.labels
    ):
        measured["script"] = scripts
    counts = shard.write_measured(out / task.name, verdicts, measured, errors)
    by_verdict: dict[str | None, list[Language]] = defaultdict(list)
    for language, verdict in zip(languages, verdicts, strict=True):
        by_verdict[verdict].append(language)
    parts: Counter[str] = Counter()
    if isinstance(section.keep, Mapping):
        keys = {str(parse_label(key)): key for key in section.keep}
        unsure = (best_match(each, keys) for each in by_verdict["language_score"])
        parts.update(key for key in unsure if key is not None)
    result: IdentifiedShard = {
        "counts": counts,
        "languages": _count_languages(languages),
        "languages_kept": _count_languages(by_verdict[None]),
        "parts": {key: {"language_score": number} for key, number in parts.items()},
        "histograms": {
            "language_score": histogram(measured["language_score"], SHARE_EDGES)
        },
    }
    return Done([out / task.name], result)


def _count_languages(languages: Sequence[Language]) -> dict[str, int]:
    return dict(sorted(Counter(language.code for language in languages).items()))


def measure(
    model: Predictor, section: LanguageId, texts: pa.Array
) -> dict[str, np.ndarray]:
    """Measures of n texts: `language`, `script` and `language_score`."""
    if section.sample == "head" and section.newlines == "space":
        # as in `view`: the model reads a newline as a space
        lines = lines_of(texts, section.max_characters)
    else:
        lines = lines_of(
            [
                view(text, section.max_characters, section.sample, section.newlines)
                for text in texts.to_pylist()
            ]
        )
    labels, scores = top_labels(model, lines)
    languages = languages_of(model, section.labels)
    return {
        "language": np.array([language.code for language in languages], "U16")[labels],
        "script": np.array([language.script for language in languages], "U4")[labels],
        "language_score": scores,
    }


def top_labels(model: Predictor, lines: Lines) -> tuple[np.ndarray, np.ndarray]:
    """Index of each of n lines' likeliest label, int32, and its score in [0, 1],
    float64.

    Raises:
        LanguageError: a line has no token that the model knows, not even the end of a
            line.
    """
    labels, scores = model.tops(lines)
    if len(labels) and labels.min() < 0:
        raise LanguageError(
            "the model knows nothing of the text, not even the end "
            "of a line: it names no language"
        )
    return labels, np.minimum(scores, 1.0)


def languages_of(model: Predictor, meanings: Mapping[str, str]) -> list[Language]:
    """Languages of a model's labels; `meanings` is the key `labels`."""
    return [parse_label(meanings.get(label, label)) for label in model.labels]


def view(
    text: str, max_characters: int, sample: str = "head", newlines: str = "space"
) -> str:
    """Model input for a text: one line of at most `max_characters`, plus the spaces
    between pieces.
    """
    if sample == "spread" and len(text) > max_characters:
        size = max(1, max_characters // PIECES)
        starts = [(len(text) - size) * piece // (PIECES - 1) for piece in range(PIECES)]
        sampled = " ".join(text[start : start + size] for start in starts)
    else:
        sampled = text[:max_characters]
    return sampled.replace("\n", "" if newlines == "delete" else " ")


def judge(language: Language, score: float, wanted: Wanted) -> str | None:
    """Reason to drop a document, or None."""
    threshold = best_match(language, wanted)
    if threshold is None:
        return "language"
    return "language_score" if score < threshold else None
