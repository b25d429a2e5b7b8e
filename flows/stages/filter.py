"""`filter`: drops documents by sets of rules, each a threshold on a statistic of the
text.
"""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.flows.stages.stage import (
    Display,
    Library,
    PrepareStep,
    Requirements,
    Stage,
)
from gristmill.mixtures.steps.filter import RULES_LANGUAGE, Filter
from gristmill.mixtures.steps.rules import columns_of, word_library


def columns(section: Filter) -> Iterable[str]:
    """Return every statistic of the chosen rule sets, and the column with the language
    whose rules judged.
    """
    language_column = [RULES_LANGUAGE] if section.by_language else []
    return [
        *(name for rule_set in section.rule_sets for name in columns_of(rule_set)),
        *language_column,
    ]


def preload(section: Filter) -> list[str]:
    """Return the preload of spaCy's tokenizer, if any rules count its words."""
    uses_spacy = "spacy" in _word_libraries(section)
    return ["gristmill.dataprep.words.spacy_preload"] if uses_spacy else []


def libraries(section: Filter) -> list[Library]:
    """Return the libraries that split words for the rules."""
    return [Library(name) for name in sorted(_word_libraries(section))]


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
    step=PrepareStep(
        Filter,
        columns,
        rules="gristmill.dataprep.filters.filter:rules",
    ),
    requirements=Requirements(libraries=libraries, preload=preload),
    display=Display(
        report=(
            "gristmill.flows.report.document_sections:lengths",
            "gristmill.flows.report.document_sections:rules_by_language",
        )
    ),
)
