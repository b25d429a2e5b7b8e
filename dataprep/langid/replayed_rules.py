"""Thresholds of the stage `langid` for replaying; importing it does not import numba."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from gristmill.dataprep.langid.check_languages import wanted_languages
from gristmill.dataprep.langid.language_codes import Language, best_match
from gristmill.dataprep.thresholds import Columns
from gristmill.dataprep.whatif_thresholds import Rule, remember_last
from gristmill.mixtures.steps.langid import LanguageId


def rules(
    stage: str, section: LanguageId, measured_columns: Collection[str]
) -> Iterator[Rule]:
    """Rules for replay: wanted languages, and their least scores."""
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
