"""`filter`: drops documents by sets of rules, each a statistic of the text held against a threshold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gristmill.flows.stages.langid import model_name
from gristmill.flows.stages.stage import Location, Recipe, Stage
from gristmill.mixtures.base import Judging
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.filter import RULES_LANGUAGE, Filter
from gristmill.mixtures.steps.langid import LanguageId
from gristmill.mixtures.steps.rules import configured_names


def columns(section: Filter) -> Iterable[str]:
    """Every statistic of the rule sets that are chosen, and whose rules judged."""
    from gristmill.dataprep.filtering.rule_columns import RULE_COLUMNS

    own = [RULES_LANGUAGE] if section.by_language else []
    return [*(name for chosen in section.rule_sets for name in RULE_COLUMNS[chosen]), *own]


def preflight(manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """What `unknown_languages` finds."""
    steps = list(manifest.steps.values())
    number = list(manifest.steps).index(name)
    yield from unknown_languages([step.config for step in steps[: number + 1]], ("prepare", number))


def unknown_languages(steps: Sequence[Judging], place: Location) -> Iterator[tuple[Location, str]]:
    """Languages in `by_language` that no document has which comes here, and those that are there twice.

    Args:
        steps: the filter's section, after those of the steps before it.
        place: of the filter in its list.
    """
    section = steps[-1]
    assert isinstance(section, Filter)
    if not section.by_language:
        return
    from gristmill.dataprep.langid.check_languages import known_labels, wanted_languages, why_unknown
    from gristmill.dataprep.langid.language_codes import is_kept, parse_label

    before = next((step for step in steps if isinstance(step, LanguageId)), None)
    seen: dict[str, str] = {}
    for key in section.by_language:
        at = (*place, STAGE.name, "by_language", key)
        language = parse_label(key)
        if str(language) in seen:
            yield at, f"is the same language as {seen[str(language)]!r}; keep one of the two"
        seen[str(language)] = key
        labels = None if before is None else known_labels(before)
        if before is None or labels is None:
            continue
        if (problem := why_unknown(str(language), labels, model_name(before))) is not None:
            yield at, problem
        elif not is_kept(language, wanted := wanted_languages(before)):
            yield (
                at,
                (
                    f"langid keeps {', '.join(wanted)} alone, so that no document in {key} comes here; add it to "
                    "langid.keep, or remove it"
                ),
            )


def recipe(section: Filter, named: Recipe) -> Recipe:
    """The settings, and what of the rows of a model of toxicity is added up: by rounding, another sum's results
    differed."""
    by_language = {key: _marked(rules) for key, rules in named.get("by_language", {}).items()}
    return {**named, "rules": _marked(named["rules"]), **({"by_language": by_language} if by_language else {})}


def _marked(rules: Recipe) -> Recipe:
    toxicity = rules.get("toxicity")
    return {**rules, "toxicity": {**toxicity, "summed_by": "product"}} if toxicity else rules


def imports(section: Filter) -> list[str]:
    """spaCy's tokeniser, where any rules count its words."""
    return ["gristmill.dataprep.words.spacy_preload"] * ("exact" in _words(section))


def needs_libraries(section: Filter) -> list[tuple[str, str]]:
    """What cuts words, where rules count other ones than gristmill's own."""
    by = {"exact": "spacy", "language": "datatrove"}
    return [("", by[words]) for words in sorted(_words(section) & by.keys())]


def _words(section: Filter) -> set[str]:
    """Whose words the rules count, by `words` of each set that has the key."""
    return {
        words
        for rules in (section.rules, *section.by_language.values())
        for name in configured_names(rules)
        if (words := getattr(getattr(rules, name), "words", None)) is not None
    }


STAGE = Stage(
    "filter",
    3,
    "gristmill.dataprep.filtering.filter:run",
    section=Filter,
    columns=columns,
    recipe=recipe,
    imports=imports,
    needs_libraries=needs_libraries,
    rules="gristmill.dataprep.filtering.filter:rules",
    preflight=preflight,
    report=(
        "gristmill.flows.report.document_sections:lengths",
        "gristmill.flows.report.document_sections:rules_by_language",
    ),
)
