"""`filter`: drops documents by sets of rules, each a threshold on a statistic of the
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gristmill.dataprep.group_losses import IntendedLosses
from gristmill.flows.stages.langid import model_name
from gristmill.flows.stages.stage import (
    Library,
    Location,
    MeasuredColumns,
    PrepareStep,
    Problems,
    Stage,
    place_of,
)
from gristmill.mixtures.base import Judging
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.filter import RULES_LANGUAGE, Filter
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.rules import Urls, columns_of, word_library


def columns(section: Filter) -> Iterable[str]:
    """Return every statistic of the chosen rule sets, and the column with the language
    whose rules judged.
    """
    language_column = [RULES_LANGUAGE] if section.by_language else []
    return [
        *(name for rule_set in section.rule_sets for name in columns_of(rule_set)),
        *language_column,
    ]


def preflight(manifest: Manifest, name: str, measured: MeasuredColumns) -> Problems:
    """Yield the problems of `unknown_languages`."""
    place = place_of(manifest, name)[:2]
    steps = list(manifest.steps.values())[: place[1] + 1]
    yield from unknown_languages([step.config for step in steps], place)


def unknown_languages(steps: Sequence[Judging], place: Location) -> Problems:
    """Yield languages in `by_language` that no document here has, and those that occur
    twice.

    Args:
        steps: the filter's section, after those of the steps before it.
        place: location of the filter in its list.
    """
    section = steps[-1]
    assert isinstance(section, Filter)
    if not section.by_language:
        return
    from gristmill.dataprep.langid.check_languages import (
        known_labels,
        wanted_languages,
        why_unknown,
    )
    from gristmill.dataprep.langid.language_codes import is_kept, parse_label

    langid_step = next((step for step in steps if isinstance(step, LanguageId)), None)
    key_of_language: dict[str, str] = {}
    for key in section.by_language:
        key_location = (*place, STAGE.name, "by_language", key)
        language = parse_label(key)
        if str(language) in key_of_language:
            yield (
                key_location,
                f"is the same language as {key_of_language[str(language)]!r}; keep "
                "one of the two",
            )
        key_of_language[str(language)] = key
        labels = None if langid_step is None else known_labels(langid_step)
        if langid_step is None or labels is None:
            continue
        problem = why_unknown(str(language), labels, model_name(langid_step))
        kept_languages = wanted_languages(langid_step)
        if problem is not None:
            yield key_location, problem
        elif not is_kept(language, kept_languages):
            yield (
                key_location,
                f"langid keeps only {', '.join(kept_languages)}, so no document in "
                f"{key} reaches this step; add it to langid.keep, or remove it",
            )


def preload(section: Filter) -> list[str]:
    """Return the preload of spaCy's tokenizer, if any rules count its words."""
    uses_spacy = "spacy" in _word_libraries(section)
    return ["gristmill.dataprep.words.spacy_preload"] if uses_spacy else []


def libraries(section: Filter) -> list[Library]:
    """Return the libraries that split words for the rules."""
    return [Library(name) for name in sorted(_word_libraries(section))]


def intended_losses(section: Filter) -> IntendedLosses:
    """Return the rules on URLs, which are about domains."""
    prefixes = ["", *(f"{language}/" for language in section.by_language)]
    return [
        ("domain", f"{prefix}urls/{name}")
        for prefix in prefixes
        for name in Urls.model_fields
    ]


def _word_libraries(section: Filter) -> set[str]:
    libraries = {
        word_library(rule_set)
        for rules in (section.rules, *section.by_language.values())
        for rule_set in rules.sets.values()
    }
    return {library for library in libraries if library is not None}


STAGE = Stage(
    "filter",
    4,
    "gristmill.dataprep.filters.filter:run",
    preflight=preflight,
    step=PrepareStep(
        Filter,
        columns,
        rules="gristmill.dataprep.filters.replayed_rules:rules",
        intended_losses=intended_losses,
    ),
    libraries=libraries,
    preload=preload,
    report=(
        "gristmill.flows.report.document_sections:lengths",
        "gristmill.flows.report.document_sections:rules_by_language",
    ),
)
