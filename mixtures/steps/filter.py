"""The section `filter`: which rule sets judge a document, those of a source or a language among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import (
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from gristmill.mixtures.base import Judging
from gristmill.mixtures.steps.rules import (
    PRESETS,
    GopherQuality,
    GopherRepetition,
    Rules,
    RuleSets,
    configured_names,
    expand,
)

LANGUAGE = re.compile(r"[a-z]{2,3}(_[A-Z][a-z]{3})?")
RULES_LANGUAGE = "rules_language"
"""The column that says by whose rules a document was judged: a key of `by_language`, or GENERAL_RULES."""
GENERAL_RULES = "general"
"""What that column has of documents that `rules` have judged, where there are rules by language."""
_GENERAL: RuleSets = {"gopher_quality": {}, "gopher_repetition": {}}


def _valid_rules(rules: Any) -> dict[str, Any]:
    """Rules as they were written, in the form of `expand`; none where they are wrong, which is told of them alone."""
    try:
        Rules.model_validate(expanded := _written(rules))
    except ValueError:
        return {}
    return dict(expanded)


def _written(rules: Any) -> Any:
    return rules.model_dump(exclude_unset=True) if isinstance(rules, Rules) else expand(rules)


def lay_over(general: Mapping[str, Any], own: Any) -> Any:
    """A language's own rules over the general ones; what is not of the form of rules is given back as it is."""
    try:
        own = _written({} if own is None else own)
    except ValueError:
        return own
    if not isinstance(own, Mapping):
        return own
    laid = {
        name: {**(general.get(name) or {}), **values} if isinstance(values, Mapping) else values
        for name, values in own.items()
    }
    return {**general, **laid}


class Filter(Judging):
    """Heuristic quality rules."""

    added = ("by_language", "unlisted")

    rules: Rules = Rules(gopher_quality=GopherQuality(), gopher_repetition=GopherRepetition())
    rule_sources: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Rule set or preset -> the only sources that it judges, where those are not all: `{fineweb: [web], code: [git]}`.
    What such a set measures is null for documents of other sources."""
    by_language: dict[str, Rules] = Field(default_factory=dict)
    """Language -> what is different of `rules` for its documents: `{de: {gopher_quality: {max_mean_word_length: 15}},
    th: {fineweb: null}}`. A key that is absent has the value that `rules` gives it, null switches a rule set off, and a
    set that `rules` lacks judges this language alone. Languages are named as in `langid`, which must come before: `zh`
    takes every script, and `zh_Hans` (or `zho_Hans`) before it that one. The column `rules_language` says which entry
    judged a document. FineWeb-2's way (Penedo et al. 2025): stop words, words and thresholds of each language."""
    unlisted: Literal["general", "keep", "drop"] = "general"
    """What becomes of documents in languages that `by_language` does not name, or of which no language was measured:
    `rules` judge them, they pass unjudged, or they are dropped as `unlisted_language`."""

    @model_validator(mode="before")
    @classmethod
    def _languages_over_rules(cls, value: Any) -> Any:
        """Give each language all rules that judge it, so that nobody else has to know what it falls back to."""
        if not isinstance(value, Mapping) or not isinstance(value.get("by_language"), Mapping):
            return value
        if False in value["by_language"]:
            raise ValueError('by_language: YAML reads `no` as false; quote the code of Norwegian: "no"')
        general = _valid_rules(value.get("rules", _GENERAL))
        return {
            **value,
            "by_language": {language: lay_over(general, own) for language, own in value["by_language"].items()},
        }

    @field_validator("by_language", mode="before", json_schema_input_type=dict[str, Rules | None])
    @classmethod
    def _codes(cls, value: Any) -> Any:
        named = value if isinstance(value, Mapping) else {}
        wrong = [repr(language) for language in named if not LANGUAGE.fullmatch(str(language))]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} is no code of a language: write ISO 639-1 where there is one (de), "
                "else ISO 639-3 (ceb), and the script behind it where it matters (zh_Hans, deu_Latn)"
            )
        return value

    @model_serializer(mode="wrap")
    def _whatever_rules_say(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Each language's rules so that nothing else of `rules` comes in when they are read again: with null for a set
        that is off, and without keys that came later (see `Section.added`) only where `rules` has the same."""
        dumped = self._omit_added_defaults(dump, info)
        if dumped.get("by_language"):
            off = dict.fromkeys(configured_names(self.rules))
            dumped["by_language"] = {
                language: {**off, **self._differing(rules, info.mode)} for language, rules in self.by_language.items()
            }
        return dumped

    def _differing(self, rules: Rules, mode: str) -> dict[str, Any]:
        dumped = rules.model_dump(mode=mode)
        for name in dumped:
            section, general = getattr(rules, name), getattr(self.rules, name)
            for key in section.added:
                usual = type(section).model_fields[key].default if general is None else getattr(general, key)
                if getattr(section, key) == usual:
                    del dumped[name][key]
        return dumped

    @field_validator("rules", mode="before", json_schema_input_type=Rules | list[str | Rules])
    @classmethod
    def _forms(cls, value: Any) -> Any:
        """Accept `[gopher_quality, {gopher_repetition: {...}}]` beside the plain mapping, and presets in both."""
        return expand(value)

    @field_validator("rule_sources", mode="before")
    @classmethod
    def _without_presets(cls, value: Any) -> Any:
        """Give the sources of a preset to the rule sets that it stands for."""
        if not isinstance(value, dict):
            return value
        return {rule_set: sources for name, sources in value.items() for rule_set in PRESETS.get(name, (name,))}

    @property
    def rule_sets(self) -> list[str]:
        """The rule sets that judge any document, in the order in which `Rules` declares them."""
        used = {name for rules in (self.rules, *self.by_language.values()) for name in configured_names(rules)}
        return [name for name in Rules.model_fields if name in used]

    @model_validator(mode="after")
    def _only_of_configured_sets(self) -> Self:
        configured = self.rule_sets
        unknown = [name for name in self.rule_sources if name not in configured]
        if unknown:
            raise ValueError(f"rule_sources names {', '.join(unknown)}, but `rules` has only {', '.join(configured)}")
        return self
