"""The stage `langid`: each document's language, by fastText's lid.176 (Joulin et al. 2016).

Languages are the model's own codes (ISO 639-1, or -3 where there is none) in lower case. The thresholds' use
follows CCNet (Wenzek et al. 2020) and FineWeb (Penedo et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, check_conservation, check_quarantine
from gristmill.dataprep.documents import annotate, judged_rows, kept_rows, read_documents, shard_names, write_table
from gristmill.dataprep.engine import Done, Task, run_tasks
from gristmill.dataprep.histograms import SHARE_EDGES, add_histograms, histogram
from gristmill.dataprep.measuring import measure_texts, spread
from gristmill.dataprep.models import MODEL_SHA256, find_model, load_model
from gristmill.mixtures.language import LanguageId

LABEL_PREFIX = "__label__"


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Measure `language` and `language_score` of every kept document, and drop what is not wanted.

    Reasons are `language` (the top language is not in `keep`) and `language_score` (its score is below `threshold`).

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `langid` section (`mixtures.language.LanguageId`).

    Returns:
        `counts`; `languages`: top language -> documents; `histograms` of `language_score`.

    Raises:
        ModelError: the language model cannot be had.
        ConservationError, QuarantineError: see `counts`.
    """
    section = LanguageId.model_validate(config)
    find_model(section.model)  # fails before any work, and fills the cache once
    tasks = [Task(shard) for shard in shard_names(inputs["ingest"])]
    process = partial(identify_shard, inputs=dict(inputs), config=section.model_dump(mode="json"), out=out)
    results = run_tasks("langid", tasks, process, context)
    counts = add_counts(result["counts"] for result in results)
    check_conservation(counts, context.stage)
    check_quarantine(counts, section.max_quarantined, context.stage)
    return {
        "counts": counts,
        "languages": add_counts(result["languages"] for result in results),
        "histograms": add_histograms(result["histograms"] for result in results),
    }


def identify_shard(task: Task, inputs: Mapping[str, Path], config: dict[str, Any], out: Path) -> Done:
    """Identify the languages of one document shard and write its annotations."""
    section = LanguageId.model_validate(config)
    documents = read_documents(inputs, task.name, ["id", "source", "text"])
    rows = kept_rows(inputs, task.name)
    judged = judged_rows(documents, rows, section.sources)
    model = load_model(str(find_model(section.model)), MODEL_SHA256)

    def measure(texts: pa.Array) -> dict[str, np.ndarray]:
        languages, scores = identify(model, texts.to_pylist(), section.max_characters)
        return {"language": languages, "language_score": scores}

    measured, errors = measure_texts(documents["text"].take(judged), measure)
    columns = {name: spread(values, errors) for name, values in measured.items()}
    keep = {language.lower() for language in section.keep}
    reasons = [
        None if error is not None else judge(language, score, keep, section.threshold)
        for language, score, error in zip(
            columns["language"].to_pylist(), columns["language_score"].to_pylist(), errors, strict=True)
    ]  # fmt: skip
    table, counts = annotate(documents, rows, judged, reasons, columns, errors)
    write_table(out / task.name, table)
    names, numbers = np.unique(measured["language"], return_counts=True)
    result = {
        "counts": counts,
        "languages": dict(zip(names.tolist(), numbers.tolist(), strict=True)),
        "histograms": {"language_score": histogram(measured["language_score"], SHARE_EDGES)},
    }
    return Done([out / task.name], result)


def identify(model: Any, texts: Sequence[str], max_characters: int) -> tuple[np.ndarray, np.ndarray]:
    """The top language of each of n texts, and its score.

    Only the first `max_characters` are looked at. Newlines become spaces, since fastText reads one line at a time.

    Returns:
        languages, str of shape (n,), and scores in [0, 1], float64 of shape (n,).
    """
    lines = [text[:max_characters].replace("\n", " ") for text in texts]
    labels, scores = model.predict(lines)  # with one string instead of a list, fastText 0.9.3 fails on NumPy 2
    languages = [label[0].removeprefix(LABEL_PREFIX).lower() for label in labels]
    tops = np.array([score[0] for score in scores], np.float64)
    return np.array(languages, "U16"), np.minimum(tops, 1.0)


def judge(language: str, score: float, keep: set[str], threshold: float) -> str | None:
    """The reason to drop a document, or None."""
    if language not in keep:
        return "language"
    return "language_score" if score < threshold else None
