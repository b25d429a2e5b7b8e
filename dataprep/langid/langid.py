"""Stage `langid`: the language of each document, and optionally of each line, by a
fastText model.

A line's language is known if the line has `min_line_characters` without surrounding
whitespace and the score of its top language reaches `line_threshold`; other lines count
for no language and are never cut.

The model is lid.176 (Joulin et al. 2016) or another one whose labels are languages;
`language_codes` normalises labels. Thresholds are used as in CCNet (Wenzek et al. 2020)
and FineWeb (Penedo et al. 2024).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict

import numpy as np
import pyarrow as pa

from gristmill.core.files import sha256_file
from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import measure_texts, spread
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
from gristmill.dataprep.documents import (
    Inputs,
    annotate,
    judged_rows,
    read_shard,
    write_table,
)
from gristmill.dataprep.edits import EDITS, Edit, apply_edits, edits_array
from gristmill.dataprep.fasttext.fasttext_backend import Predictor, load_model
from gristmill.dataprep.fasttext.fasttext_models import find_model
from gristmill.dataprep.fasttext.fasttext_predict import lines_of
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
from gristmill.dataprep.whatif_thresholds import (
    Columns,
    Rule,
    remember_last,
    threshold_rules,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.langid import LanguageId

LANGUAGES_NAMED = 3
"""Languages that a document's column names: the most frequent ones."""


@dataclass(frozen=True)
class LineJudgement:
    """Languages of the lines of one document.

    Attributes:
        characters: language -> characters of its known lines.
        wanted_characters: of these, the characters in wanted languages.
        cuts: edits that remove lines of other languages.
        lines_cut: number of removed lines.
        lines_left: remaining lines that are not blank.
    """

    characters: Mapping[str, int] = field(default_factory=dict)
    wanted_characters: int = 0
    cuts: Sequence[Edit] = ()
    lines_cut: int = 0
    lines_left: int = 0

    @property
    def share(self) -> float:
        """Share of the known characters in wanted languages; NaN if no line is
        known.
        """
        total = sum(self.characters.values())
        return self.wanted_characters / total if total else float("nan")


def judge_lines(
    texts: Sequence[str],
    identify: Callable[[Sequence[str]], tuple[list[Language], np.ndarray]],
    is_wanted: Callable[[Language], bool],
    section: LanguageId,
) -> list[LineJudgement]:
    """Judge the lines of n texts; all lines go through the model in one batch.

    Args:
        texts: documents.
        identify: lines -> their languages and scores.
        is_wanted: returns True for a language to keep.
        section: thresholds of lines.
    """
    lines = [text.split("\n") for text in texts]
    long_lines = [
        (document, number, line)
        for document, document_lines in enumerate(lines)
        for number, line in enumerate(document_lines)
        if len(line.strip()) >= section.min_line_characters
    ]
    languages, scores = identify([line for _, _, line in long_lines])
    characters = [Counter[str]() for _ in lines]
    wanted_characters = [0] * len(lines)
    cut_numbers = [set[int]() for _ in lines]
    for (document, number, line), language, score in zip(
        long_lines, languages, scores.tolist(), strict=True
    ):
        if score < section.line_threshold:
            continue
        size = len(line.strip())
        characters[document][language.code] += size
        if is_wanted(language):
            wanted_characters[document] += size
        elif section.cut_other_lines:
            cut_numbers[document].add(number)
    judgements = []
    for document, document_lines in enumerate(lines):
        numbers = cut_numbers[document]
        lines_left = [
            number
            for number, line in enumerate(document_lines)
            if number not in numbers and line.strip()
        ]
        judgements.append(
            LineJudgement(
                characters[document],
                wanted_characters[document],
                cut_lines(document_lines, numbers),
                len(numbers),
                len(lines_left),
            )
        )
    return judgements


def cut_lines(lines: Sequence[str], numbers: set[int]) -> list[Edit]:
    """Edits that remove the lines with these numbers and their newlines; adjacent lines
    make one edit.
    """
    if not numbers:
        return []
    starts = [0, *accumulate(len(line.encode("utf-8")) + 1 for line in lines)]
    edits: list[Edit] = []
    for number in sorted(numbers):
        begin = starts[number]
        if edits and edits[-1][1] == begin:
            begin, _, _ = edits.pop()
        edits.append((begin, starts[number + 1], ""))
    begin, end, _ = edits[-1]
    if end > starts[-1] - 1:  # the last line has no newline: remove the one before it
        edits[-1] = (max(0, begin - 1), starts[-1] - 1, "")
    return edits


def describe_lines(lines: Iterable[LineJudgement], cut: bool) -> dict[str, np.ndarray]:
    """Columns of n documents' line languages.

    `line_languages` names the most frequent ones with their shares of the known
    characters, as `en 0.91, de 0.09`.
    """
    lines = list(lines)
    names = []
    for line in lines:
        total = sum(line.characters.values())
        ranked = sorted(line.characters.items(), key=lambda item: (-item[1], item[0]))
        shares = [
            f"{code} {size / total:.2f}" for code, size in ranked[:LANGUAGES_NAMED]
        ]
        names.append(", ".join(shares))
    columns = {
        "line_languages": np.array(names, str),
        "line_language_share": np.array([line.share for line in lines]),
    }
    if cut:
        columns["language_lines_cut"] = np.array(
            [line.lines_cut for line in lines], np.int64
        )
        columns["language_lines_left"] = np.array(
            [line.lines_left for line in lines], np.int64
        )
    return columns


PIECES = 4
"""Pieces of a document that `sample: spread` reads."""

Predictions = tuple[list[Language], np.ndarray]
"""Top language of each of n lines, and its score in [0, 1] (float64 of shape (n,))."""


class CutLines(TypedDict):
    """Lines of other languages that were cut from kept documents."""

    lines: int
    bytes: int


class IdentifiedShard(Counted, total=False):
    """Result of identifying the languages of a shard; see `LanguageSummary`."""

    languages: dict[str, int]
    languages_kept: dict[str, int]
    parts: dict[str, dict[str, int]]
    histograms: Histograms
    line_languages: dict[str, int]
    cut: CutLines


@dataclass(frozen=True)
class LanguageSummary:
    """Summary of the languages.

    Attributes:
        counts: documents by outcome.
        languages: top language -> documents.
        languages_kept: of these, the kept ones.
        parts: key of a mapping `keep` -> reason -> documents.
        histograms: of `language_score`.
        fallback: the reason for predicting with fastText itself, which is slower, if it
            was used.
        line_languages: with `lines`, language -> characters.
        cut: with `lines`, the cut ones.
    """

    counts: Counts
    languages: Mapping[str, int]
    languages_kept: Mapping[str, int]
    parts: Mapping[str, Mapping[str, int]]
    histograms: Histograms
    fallback: str | None = None
    line_languages: Mapping[str, int] | None = None
    cut: CutLines | None = None


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> LanguageSummary:
    """Measure `language` and `language_score` of every kept document, and drop unwanted
    documents.

    A model whose labels name scripts adds a column `script`. With `lines`,
    `line_languages` has up to three languages with their shares of the document's known
    characters, and `line_language_share` the share of the wanted languages (NaN if no
    line is known); with `cut_other_lines`, `language_lines_cut` and
    `language_lines_left` count lines.

    Reasons: `language` (the top language is not in `keep`), `language_score` (its score
    is below the threshold), `langid/min_line_language_share`, `langid/no_lines_left`
    (all lines were cut).

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
    tasks = shard_tasks(inputs["ingest"])
    process = partial(
        identify_shard,
        inputs=dict(inputs),
        section=section.model_copy(update={"model": str(path)}),
        out=out,
        sha256=sha256,
    )
    results = run_tasks(
        "langid",
        tasks,
        process,
        context,
        holds_gil=bool(model.fallback) or section.lines,
    )
    return LanguageSummary(
        balance(results, section.max_quarantined, context.stage, errors=out),
        add_counts(result["languages"] for result in results),
        add_counts(result["languages_kept"] for result in results),
        add_counts(result["parts"] for result in results),
        add_histograms(result["histograms"] for result in results),
        fallback=model.fallback or None,
        line_languages=add_counts(result["line_languages"] for result in results)
        if section.lines
        else None,
        cut=add_counts(result["cut"] for result in results) if section.lines else None,
    )


def identify_shard(
    task: ShardTask,
    inputs: Inputs,
    section: LanguageId,
    out: Path,
    sha256: str,
) -> Done[IdentifiedShard]:
    """Identify the languages of one document shard and write its annotations."""
    read = read_shard(inputs, task.name, ["id", "source", "text"])
    documents, rows = read.documents, read.rows
    judged = judged_rows(documents, rows, section.sources)
    model = load_model(str(find_model(section.model)), sha256)
    thresholds = wanted_languages(section)
    measured, errors = measure_texts(
        documents["text"].take(judged), partial(measure, model, section, thresholds)
    )
    lines = measured.pop("lines")
    scripts = measured.pop("script")
    languages = [
        Language(*language)
        for language in zip(
            measured["language"].tolist(), scripts.tolist(), strict=True
        )
    ]
    verdicts = [
        judge(language, score, section, thresholds, line_judgement)
        for language, score, line_judgement in zip(
            languages, measured["language_score"].tolist(), lines, strict=True
        )
    ]
    reasons = spread(np.array(verdicts, object), errors).to_pylist()
    if any(
        parse_label(section.labels.get(label, label)).script for label in model.labels
    ):
        measured["script"] = scripts
    if section.lines:
        measured.update(describe_lines(lines, section.cut_other_lines))
    columns = {name: spread(values, errors) for name, values in measured.items()}
    if section.cut_other_lines:
        judgements = iter(lines)
        columns[EDITS] = edits_array(
            [() if error is not None else next(judgements).cuts for error in errors]
        )
    table, counts = annotate(documents, rows, judged, reasons, columns, errors)
    write_table(out / task.name, table)
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
    if section.lines:
        result["line_languages"] = add_counts(line.characters for line in lines)
        kept_lines = [
            line
            for line, verdict in zip(lines, verdicts, strict=True)
            if verdict is None
        ]
        result["cut"] = {
            "lines": sum(line.lines_cut for line in kept_lines),
            "bytes": sum(
                end - begin for line in kept_lines for begin, end, _ in line.cuts
            ),
        }
    return Done([out / task.name], result)


def _count_languages(languages: Sequence[Language]) -> dict[str, int]:
    return dict(sorted(Counter(language.code for language in languages).items()))


def measure(
    model: Predictor, section: LanguageId, wanted: Wanted, texts: pa.Array
) -> dict[str, np.ndarray]:
    """Measures of n texts: `language`, `script`, `language_score`, and the judgements
    of their `lines`.
    """
    lines = np.empty(len(texts), object)
    if not section.lines and section.sample == "head" and section.newlines == "space":
        # as in `view`: the model reads a newline as a space
        heads = lines_of(texts, section.max_characters)
        return {**_columns(model, heads, section), "lines": lines}
    documents = texts.to_pylist()
    if section.lines:
        shorten = partial(
            view, max_characters=section.max_characters, sample=section.sample
        )
        lines[:] = judge_lines(
            documents,
            lambda long_lines: identify(
                model, [shorten(line) for line in long_lines], section.labels
            ),
            lambda language: best_match(language, wanted) is not None,
            section,
        )
        cuts = [line.cuts if line.lines_left else () for line in lines]
        documents = apply_edits(texts, edits_array(cuts)).to_pylist()
    views = [
        view(text, section.max_characters, section.sample, section.newlines)
        for text in documents
    ]
    return {**_columns(model, lines_of(views), section), "lines": lines}


def _columns(
    model: Predictor, lines: Lines, section: LanguageId
) -> dict[str, np.ndarray]:
    labels, scores = top_labels(model, lines)
    languages = languages_of(model, section.labels)
    return {
        "language": np.array([language.code for language in languages], "U16")[labels],
        "script": np.array([language.script for language in languages], "U4")[labels],
        "language_score": scores,
    }


def identify(
    model: Predictor,
    lines: Sequence[str],
    meanings: Mapping[str, str] = MappingProxyType({}),
) -> Predictions:
    """Top language of each of n lines, and its score; `meanings` as the key `labels`.

    Raises:
        LanguageError: a line has no token that the model knows, not even the end of a
            line.
    """
    labels, scores = top_labels(model, lines_of(lines))
    languages = languages_of(model, meanings)
    return [languages[label] for label in labels.tolist()], scores


def top_labels(model: Predictor, lines: Lines) -> tuple[np.ndarray, np.ndarray]:
    """Index of each line's likeliest label, int32 of shape (n,), and its score; raises
    as `identify`.
    """
    labels, scores = model.tops(lines)
    if len(labels) and labels.min() < 0:
        raise LanguageError(
            "the model knows nothing of the text, not even the end "
            "of a line: it names no language"
        )
    return labels, np.minimum(scores, 1.0)


def languages_of(model: Predictor, meanings: Mapping[str, str]) -> list[Language]:
    """Languages of a model's labels; `meanings` as the key `labels`."""
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


def judge(
    language: Language,
    score: float,
    section: LanguageId,
    wanted: Wanted,
    lines: LineJudgement | None = None,
) -> str | None:
    """Reason to drop a document, or None."""
    threshold = best_match(language, wanted)
    if threshold is None:
        return "language"
    if score < threshold:
        return "language_score"
    if lines is None:
        return None
    if (
        section.min_line_language_share is not None
        and lines.share < section.min_line_language_share
    ):
        return "langid/min_line_language_share"
    return (
        "langid/no_lines_left"
        if section.cut_other_lines and lines.lines_cut and not lines.lines_left
        else None
    )


def rules(
    stage: str, section: LanguageId, measured_columns: Collection[str]
) -> Iterator[Rule]:
    """Rules for replay: wanted languages, their least scores, and the share of their
    lines.
    """
    thresholds = wanted_languages(section)
    reads = ("language", "script") if "script" in measured_columns else ("language",)
    numbers = {name: number for number, name in enumerate(thresholds)}

    @remember_last
    def matches(columns: Columns) -> np.ndarray:
        """Index of each document's language in `thresholds`: -1 if it is not wanted, -2
        if unknown.
        """
        codes = columns["language"]
        scripts = columns.get("script", np.full(len(codes), None, object))
        matched = [
            -2 if code is None else best_match(Language(code, script or ""), numbers)
            for code, script in zip(codes, scripts, strict=True)
        ]
        return np.array(
            [-1 if number is None else number for number in matched], np.int64
        )

    yield Rule(
        "language",
        f"{stage}.keep",
        "language",
        tuple(section.keep),
        lambda columns: matches(columns) == -1,
        reads,
    )

    def score_rule(
        key: str, bound: float, first: int, last: int, part: str, unless: str
    ) -> Rule:
        """Rule of the languages numbered from `first` to `last`."""

        def is_unsure(columns: Columns) -> np.ndarray:
            matched = matches(columns)
            below: np.ndarray = columns["language_score"] < bound
            return below & (first <= matched) & (matched <= last)

        return Rule(
            "language_score",
            f"{stage}.{key}",
            "language_score",
            bound,
            is_unsure,
            (*reads, "language_score"),
            part=part,
            unless=unless,
        )

    if isinstance(section.keep, Mapping):
        for number, (key, bound) in enumerate(section.keep.items()):
            yield score_rule(f"keep.{key}", bound, number, number, key, "")
    else:
        every = len(thresholds) - 1
        yield score_rule("threshold", section.threshold, 0, every, "", "language")
    yield from threshold_rules(section, stage, stage)
