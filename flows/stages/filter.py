"""`filter`: drops documents by sets of rules, each a statistic of the text held against a threshold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gristmill.flows.stages.langid import model_name
from gristmill.flows.stages.stage import Location, Stage
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.filter import RULES_LANGUAGE, Filter
from gristmill.mixtures.steps.langid import LanguageId


def columns(section: Filter) -> Iterable[str]:
    """Every statistic of the rule sets that are chosen, and whose rules judged."""
    from gristmill.dataprep.filtering.rule_sets import RULE_SETS

    own = [RULES_LANGUAGE] if section.by_language else []
    return [*(name for chosen in section.rule_sets for name in RULE_SETS[chosen].statistics), *own]


def preflight(
    manifest: Manifest, name: str, measured: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Location, str]]:  # fmt: skip
    """Languages in `by_language` that no document has which comes here, and those that are there twice."""
    from gristmill.dataprep.judges.langid import known_labels, wanted_languages, why_unknown
    from gristmill.dataprep.judges.language_codes import is_kept, parse_label

    steps = list(manifest.steps.values())
    number = list(manifest.steps).index(name)
    section = steps[number].config
    assert isinstance(section, Filter)
    before = next((step.config for step in steps[:number] if isinstance(step.config, LanguageId)), None)
    seen: dict[str, str] = {}
    for key in section.by_language:
        place = ("prepare", number, STAGE.name, "by_language", key)
        language = parse_label(key)
        if str(language) in seen:
            yield place, f"is the same language as {seen[str(language)]!r}; keep one of the two"
        seen[str(language)] = key
        labels = None if before is None else known_labels(before)
        if before is None or labels is None:
            continue
        if (problem := why_unknown(str(language), labels, model_name(before))) is not None:
            yield place, problem
        elif not is_kept(language, wanted := wanted_languages(before)):
            yield place, (f"langid keeps {', '.join(wanted)} alone, so that no document in {key} comes here; add it to "
                          "langid.keep, or remove it")


STAGE = Stage("filter", 2, "gristmill.dataprep.filtering.filter:run", section=Filter, columns=columns,
              rules="gristmill.dataprep.filtering.filter:rules", preflight=preflight,
              report=("gristmill.flows.report.document_sections:lengths",
                      "gristmill.flows.report.document_sections:rules_by_language"))
