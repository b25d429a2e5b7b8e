"""Which columns the stages of `prepare` measure, known from the manifest alone, before any of them has run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gristmill.mixtures.clean import Clean
from gristmill.mixtures.decontaminate import Decontaminate
from gristmill.mixtures.dedup import Dedup, DedupLines, DedupSubstrings
from gristmill.mixtures.filter import Filter
from gristmill.mixtures.langid import LanguageId
from gristmill.mixtures.prepare import Step
from gristmill.mixtures.quality import Quality


def measured_by(step: Step) -> list[str]:
    """The columns that a stage may write: all that it writes, and perhaps some that its inputs leave out (`script`,
    for a language model whose labels name none).
    """
    return list(dict.fromkeys(_MEASURED[step.stage](step.config)))


def _clean(section: Clean) -> Iterable[str]:
    from gristmill.dataprep.cleaning.clean import REMOVED_RATIO, RULE_PREFIX, WORDS_LEFT, steps
    from gristmill.dataprep.edits import EDITS

    return [EDITS, WORDS_LEFT, REMOVED_RATIO, *(RULE_PREFIX + rule for step in steps(section) for rule in step.rules)]


def _filter(section: Filter) -> Iterable[str]:
    from gristmill.dataprep.filtering.rule_sets import RULE_SETS, configured_sets

    return [name for chosen in configured_sets(section.rules) for name in RULE_SETS[chosen].statistics]


def _dedup(_: Dedup) -> Iterable[str]:
    return ["cluster", "cluster_size", "duplicate_of", "jaccard", "against_index", "against_locator"]


def _dedup_lines(_: DedupLines) -> Iterable[str]:
    return ["lines_removed", "removed_line_ratio", "edits"]


def _dedup_substrings(_: DedupSubstrings) -> Iterable[str]:
    return ["duplicated_substring_words", "duplicated_substring_ratio", "edits"]


def _langid(section: LanguageId) -> Iterable[str]:
    lines = ["line_languages", "line_language_share", "language_lines_cut", "language_lines_left"]
    return ["language", "language_score", "script", *(lines if section.lines else []), "edits"]


def _quality(section: Quality) -> Iterable[str]:
    return [*section.scores, "perplexity_bucket"]


def _decontaminate(_: Decontaminate) -> Iterable[str]:
    return ["contamination", "contamination_words", "contaminated_item", "left_words", "edits"]


_MEASURED: dict[str, Callable[[Any], Iterable[str]]] = {
    "clean": _clean, "filter": _filter, "dedup": _dedup, "dedup_lines": _dedup_lines,
    "dedup_substrings": _dedup_substrings, "langid": _langid, "quality": _quality, "decontaminate": _decontaminate,
}  # fmt: skip
