"""Replaying verdicts: what other thresholds would have done, from the values that were measured, in seconds.

Every rule of a preparing stage that compares one measured number with one setting is a `Rule` here: it can be judged
again without reading any text. A setting that changes what is measured (a dialect, a model, a band) has no rule, and
changing it needs a run. `keep_top`, which compares documents with each other, is in `replay.py`.

Unlike the rules of `replay.py` it looks at all documents at once: those that the stage saw and that pass what is
replayed of the stages before it, as in a run with the same settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import annotation_stages, read_annotations, read_documents, shard_names
from gristmill.dataprep.judges.labelled_examples import draw
from gristmill.dataprep.judges.langid import best_match, wanted_languages
from gristmill.dataprep.judges.language_codes import Language
from gristmill.dataprep.judges.ranking import Cuts, group_names, kept_by_rank, rank_documents
from gristmill.dataprep.judges.scorers import SCORES
from gristmill.mixtures.section import Judging
from gristmill.mixtures.steps.decontaminate import Decontaminate
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.quality import Quality

JUDGEMENT_COLUMNS = ("keep", "reason")
SOURCE = "source"
LANGUAGE_SCORE = "language_score"
Columns = Mapping[str, np.ndarray]


class NotReplayableError(ValueError):
    """A setting was changed that no stored value answers for."""


@dataclass(frozen=True)
class Rule:
    """One rule of a stage.

    Attributes:
        name: the reason that is written where a document fails it.
        key: the setting below `prepare`, e.g. `filter.rules.gopher_quality.min_words`.
        statistic: the measured column that is held against the bound.
        bound: the setting's value.
        fails: columns (float64, NaN where there is no value; text as objects) -> bool; a missing value never fails.
        reads: all columns that it looks at; `source` and `id` are those of the documents.
        margins: how far each document is from the cut, where that is not the distance to `bound`.
        step: the step's name, where that is not its stage's.
    """

    name: str
    key: str
    statistic: str
    bound: Any
    fails: Callable[[Columns], np.ndarray]
    reads: tuple[str, ...]
    margins: Callable[[Columns], np.ndarray] | None = None
    step: str = ""

    @property
    def label(self) -> str:
        """What tells it from the rules of other steps: its name, behind the step's where that has one of its own."""
        return f"{self.step}: {self.name}" if self.step else self.name


@dataclass
class Tally:
    """How often a rule is failed: by documents in all (`failing`), and by documents that fail no other (`only`)."""

    failing: int = 0
    only: int = 0


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on a shard's rows that a stage saw.

    Attributes:
        rows: int64, the rows that the stage saw, ascending.
        keep: bool per row.
        failed: label of a rule -> bool per row.
        columns: statistic -> float64 per row, NaN where nothing was measured.
    """

    rows: np.ndarray
    keep: np.ndarray
    failed: Mapping[str, np.ndarray]
    columns: Columns
    tallies: Mapping[str, Tally] = field(default_factory=dict)


def rules_of(stage: str, section: Judging, measured_columns: Collection[str], step: str | None = None) -> list[Rule]:
    """The replayable rules of a step, in the order in which they are tried: those whose columns were measured.

    Args:
        stage: its stage.
        section: its settings.
        measured_columns: of its annotations.
        step: its name, where that is another.
    """
    found = [rule for rule in _rules(stage, section, measured_columns) if set(rule.reads) <= set(measured_columns)]
    if step is None or step == stage:
        return found
    return [replace(rule, key=f"{step}.{rule.key.partition('.')[2]}", step=step) for rule in found]


def _rules(stage: str, section: Judging, measured_columns: Collection[str]) -> Iterator[Rule]:
    if isinstance(section, Filter):
        for name in type(section.rules).model_fields:
            thresholds = getattr(section.rules, name)
            if thresholds is not None:
                yield from _bounds(thresholds, f"{stage}.rules.{name}", name)
    elif isinstance(section, LanguageId):
        yield from _languages(stage, section, "script" in measured_columns)
    if isinstance(section, Decontaminate) and section.action == "excise":
        # The other bounds decide what is cut, so that nothing stored says what would be left.
        least, column = section.min_left_words, "left_words"
        fails = _below(column, least)
        yield Rule(f"{stage}/min_left_words", f"{stage}.min_left_words", column, least, fails, (column,))
        return
    yield from _bounds(section, stage, stage)


def _bounds(section: Any, key: str, prefix: str) -> Iterator[Rule]:
    for name in type(section).model_fields:
        side, _, statistic = name.partition("_")
        bound = getattr(section, name)
        if side in ("min", "max") and isinstance(bound, int | float):
            fails = _below(statistic, bound) if side == "min" else _above(statistic, bound)
            yield Rule(f"{prefix}/{name}", f"{key}.{name}", statistic, bound, fails, (statistic,))


def _below(statistic: str, bound: float) -> Callable[[Columns], np.ndarray]:
    return lambda columns: columns[statistic] < bound


def _above(statistic: str, bound: float) -> Callable[[Columns], np.ndarray]:
    return lambda columns: columns[statistic] > bound


def _languages(stage: str, section: LanguageId, with_scripts: bool) -> Iterator[Rule]:
    wanted = wanted_languages(section)
    reads = ("language", "script") if with_scripts else ("language",)

    def least_scores(columns: Columns) -> np.ndarray:
        """The score that each document's language needs: NaN where it is not wanted, or where nothing is known."""
        codes = columns["language"]
        scripts = columns.get("script", np.full(len(codes), None, object))
        found = [None if code is None else best_match(Language(code, script or ""), wanted)
                 for code, script in zip(codes, scripts, strict=True)]
        return np.array([math.nan if score is None else score for score in found], np.float64)

    def unwanted(columns: Columns) -> np.ndarray:
        known = np.array([code is not None for code in columns["language"]], bool)
        return known & np.isnan(least_scores(columns))

    def unsure(columns: Columns) -> np.ndarray:
        return columns["language_score"] < least_scores(columns)

    bound = section.keep if isinstance(section.keep, dict) else section.threshold
    yield Rule("language", f"{stage}.keep", "language", section.keep, unwanted, reads)
    yield Rule(LANGUAGE_SCORE, f"{stage}.threshold", "language_score", bound, unsure, (*reads, "language_score"))


def judge_shard(
    inputs: Mapping[str, Path], shard: str, stage: str, before: list[Rule], after: list[Rule]
) -> tuple[Verdicts, Verdicts]:
    """The stored verdicts of a stage on a shard, and those that other bounds would give.

    A document that was quarantined, or dropped for a reason that is not a rule, stays dropped.

    Args:
        before: the rules that the stage ran with.
        after: the same rules with other bounds, or more of them.
    """
    wanted = sorted({name for rule in [*before, *after] for name in rule.reads})
    stored = [name for name in wanted if name != SOURCE]
    table = read_annotations(inputs, shard, stage, [*JUDGEMENT_COLUMNS, *stored])
    if SOURCE in wanted:
        table = table.append_column(SOURCE, read_documents(inputs, shard, [SOURCE])[SOURCE])
    seen = pc.is_valid(table["keep"]).to_numpy(zero_copy_only=False).astype(bool)
    rows = np.flatnonzero(seen).astype(np.int64)
    table = table.take(pa.array(rows))
    kept = table["keep"].to_numpy(zero_copy_only=False).astype(bool)
    reasons = np.array(table["reason"].cast(pa.string()).to_pylist(), object)
    columns = {name: measured(table[name]) for name in wanted}
    fixed = ~kept & ~np.isin(reasons.astype(str), [rule.name for rule in before])
    return tuple(  # type: ignore[return-value]
        _verdicts(rows, columns, rules, fixed) for rules in (before, after)
    )


def _verdicts(rows: np.ndarray, columns: Columns, rules: list[Rule], fixed: np.ndarray) -> Verdicts:
    failed = {rule.label: rule.fails(columns) & ~fixed for rule in rules}
    number = np.sum(list(failed.values()), axis=0) if failed else np.zeros(len(rows), np.int64)
    tallies = {
        name: Tally(int(mask.sum()), int((mask & (number == 1) & ~fixed).sum())) for name, mask in failed.items()
    }
    return Verdicts(rows, ~fixed & (number == 0), failed, columns, tallies)


def measured(column: pa.ChunkedArray) -> np.ndarray:
    """A measured column as float64 with NaN for null; text as objects with None, and so are ids."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_fixed_size_binary(kind):
        return np.array(column.to_pylist(), object)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(column.cast(pa.string()).to_pylist(), object)
    values: np.ndarray = pc.fill_null(column.cast(pa.float64()), math.nan).to_numpy(zero_copy_only=False)
    return values


def nearest(verdicts: Verdicts, rule: Rule, most: int) -> dict[str, list[tuple[float, int, float]]]:
    """The documents next to a rule's cut on either side.

    Returns:
        `failing` and `passing`: (distance to the bound, row, value), nearest first.
    """
    if rule.label not in verdicts.failed or not isinstance(rule.bound, int | float):
        return {"failing": [], "passing": []}
    values, failed = verdicts.columns[rule.statistic], verdicts.failed[rule.label]
    sides = {"failing": failed, "passing": ~failed & ~np.isnan(values)}
    found = {}
    for name, mask in sides.items():
        places = np.flatnonzero(mask)
        distance = (np.abs(values - rule.bound) if rule.margins is None else rule.margins(verdicts.columns))[places]
        order = np.lexsort((verdicts.rows[places], distance))[:most]
        found[name] = [(float(distance[at]), int(verdicts.rows[places[at]]), float(values[places[at]]))
                       for at in order]
    return found


NAME = "quality/keep_top"
"""The reason that is written of a document."""
KEY = "keep_top"
Rules = Mapping[str, Sequence[Rule]]
"""Stage -> its rules."""


def keep_top_rule(
    inputs: Mapping[str, Path], stage: str, section: Judging, seed: int, ran: Rules, replayed: Rules,
    measured_columns: Collection[str],
) -> Rule | None:  # fmt: skip
    """The rule of a stage that keeps the best share, having found where that share ends; None for any other stage.

    Args:
        inputs: `ingest` and the committed stages.
        seed: of the hashes that decide between equal scores.
        ran: the rules that the stages ran with.
        replayed: those to judge by instead, at least of the stages before this one.
        measured_columns: of the stage's annotations.
    """
    if not isinstance(section, Quality) or section.keep_top is None or section.ranked_by not in measured_columns:
        return None
    score = section.ranked_by
    ranked = Rule(NAME, f"{stage}.{KEY}", score, section.keep_top, nobody, (score, "source", "id"))

    def read() -> Iterator[tuple[Sequence[str], np.ndarray, np.ndarray]]:
        for shard in shard_names(inputs["ingest"]):
            verdicts, _ = judge_shard(inputs, shard, stage, [ranked], [ranked])
            reached = np.isin(verdicts.rows, _rows_left(inputs, shard, stage, ran, replayed))
            chosen = reached & ~np.isnan(verdicts.columns[score])
            columns = {name: values[chosen] for name, values in verdicts.columns.items()}
            yield columns["source"].tolist(), columns[score], _ties(columns, seed)

    cuts = rank_documents(read, score, SCORES[score].higher_is_better, section.keep_top, section.per_source)

    def fails(columns: Columns) -> np.ndarray:
        kept = kept_by_rank(cuts, columns["source"].tolist(), columns[score], _ties(columns, seed))
        return ~np.isnan(columns[score]) & ~kept

    def margins(columns: Columns) -> np.ndarray:
        return _margins(cuts, columns["source"].tolist(), columns[score])

    return replace(ranked, fails=fails, margins=margins, step="" if NAME.startswith(f"{stage}/") else stage)


def nobody(columns: Columns) -> np.ndarray:
    """No document fails."""
    return np.zeros(len(columns["id"]), bool)


def _rows_left(inputs: Mapping[str, Path], shard: str, stage: str, ran: Rules, replayed: Rules) -> np.ndarray:
    """Rows of a shard that a stage saw, and that pass the replayed rules of the stages before it."""
    seen, _ = judge_shard(inputs, shard, stage, [], [])
    left = seen.rows
    stages = annotation_stages(inputs)
    for before in stages[: stages.index(stage)]:
        _, verdicts = judge_shard(inputs, shard, before, list(ran[before]), list(replayed[before]))
        left = np.intersect1d(left, verdicts.rows[verdicts.keep])
    return left


def _ties(columns: Columns, seed: int) -> np.ndarray:
    ties: np.ndarray = draw(columns["id"].tolist(), seed)[:, 1]
    return ties


def _margins(cuts: Cuts, sources: Sequence[str], scores: np.ndarray) -> np.ndarray:
    groups = group_names(sources, cuts.per_source)
    at = {name: found.score for name, found in cuts.found.items()}
    margins: np.ndarray = np.abs(scores - np.array([at.get(name, np.nan) for name in groups.tolist()], np.float64))
    return margins
