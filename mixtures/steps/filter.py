"""The section `filter`: rule sets that judge documents, with those for single sources
and languages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import (
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from gristmill.mixtures.base import DumpedSection, Judging, RawSection
from gristmill.mixtures.steps.rules import (
    PRESETS,
    GopherQuality,
    GopherRepetition,
    Rules,
    RuleSets,
    expand,
)

LANGUAGE = re.compile(r"[a-z]{2,3}(_[A-Z][a-z]{3})?")
RULES_LANGUAGE = "rules_language"
"""Column that names the rules by which a document was judged: a key of `by_language`,
or GENERAL_RULES.
"""
GENERAL_RULES = "general"
"""Value of that column for documents that `rules` have judged, if there are rules by
language.
"""
_GENERAL: RuleSets = {"gopher_quality": {}, "gopher_repetition": {}}


def _written(rules: Any) -> Any:
    return (
        rules.model_dump(exclude_unset=True)
        if isinstance(rules, Rules)
        else expand(rules)
    )


def lay_over(general: RawSection, rules: Any) -> Any:
    """Return a language's own rules merged over the general ones; anything that is not
    rules is returned unchanged.
    """
    try:
        rules = _written({} if rules is None else rules)
    except ValueError:
        return rules
    if not isinstance(rules, Mapping):
        return rules
    merged = {
        name: {**(general.get(name) or {}), **values}
        if isinstance(values, Mapping)
        else values
        for name, values in rules.items()
    }
    return {**general, **merged}


class Filter(Judging):
    """Heuristic quality rules."""

    added = ("by_language", "unlisted")

    rules: Rules = Rules(
        gopher_quality=GopherQuality(), gopher_repetition=GopherRepetition()
    )
    rule_sources: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Rule set or preset -> the only sources that it judges, if not all: `{fineweb:
    [web], code: [git]}`. Its measurements are null for documents of other sources.
    """
    by_language: dict[str, Rules] = Field(default_factory=dict)
    """Language -> differences from `rules` for its documents: `{de: {gopher_quality:
    {max_mean_word_length: 15}}, th: {fineweb: null}}`. An absent key has its value from
    `rules`, null disables a rule set, and a set that `rules` lacks judges only this
    language. Languages are named as in `langid`, which must come before: `zh` matches
    every script, and `zh_Hans` (or `zho_Hans`), which takes precedence, only that one.
    The column `rules_language` names the entry that judged a document. FineWeb-2 does
    the same (Penedo et al. 2025): stop words, words and thresholds of each language.
    """
    unlisted: Literal["general", "keep", "drop"] = "general"
    """Treatment of documents in languages that `by_language` does not name, or without
    a measured language: `rules` judge them, they pass unjudged, or they are dropped as
    `unlisted_language`.
    """

    @model_validator(mode="before")
    @classmethod
    def _languages_over_rules(cls, value: Any) -> Any:
        """Expand the rules of each language to all rules that judge it, so that no
        other code needs the fallback.
        """
        if not isinstance(value, Mapping) or not isinstance(
            value.get("by_language"), Mapping
        ):
            return value
        if False in value["by_language"]:
            raise ValueError(
                "by_language: YAML reads `no` as false; quote the code "
                'of Norwegian: "no"'
            )
        try:
            general = _written(value.get("rules", _GENERAL))
            Rules.model_validate(general)
        except ValueError:
            general = {}  # Wrong rules are reported once, for `rules`.
        by_language = {
            language: lay_over(general, rules)
            for language, rules in value["by_language"].items()
        }
        return {**value, "by_language": by_language}

    @field_validator(
        "by_language", mode="before", json_schema_input_type=dict[str, Rules | None]
    )
    @classmethod
    def _codes(cls, value: Any) -> Any:
        entries = value if isinstance(value, Mapping) else {}
        wrong = [
            repr(language)
            for language in entries
            if not LANGUAGE.fullmatch(str(language))
        ]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} is not a language code: write ISO 639-1 if it "
                "exists (de), else ISO 639-3 (ceb), followed by the script if it "
                "matters (zh_Hans, deu_Latn)"
            )
        return value

    @model_serializer(mode="wrap")
    def _whatever_rules_say(
        self, dump: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> DumpedSection:
        """Dump each language's rules so that reading them again does not merge anything
        else of `rules`: with null for a disabled set, and without keys added later (see
        `Section.added`) only if they equal those of `rules`.
        """
        dumped = self._omit_added_defaults(dump, info)
        if not dumped.get("by_language"):
            return dumped
        dumped["by_language"] = {}
        disabled = dict.fromkeys(self.rules.sets)
        for language, rules in self.by_language.items():
            sets = rules.model_dump(mode=info.mode)
            for name in sets:
                section, general = getattr(rules, name), getattr(self.rules, name)
                for key in section.added:
                    inherited = (
                        type(section).model_fields[key].default
                        if general is None
                        else getattr(general, key)
                    )
                    if getattr(section, key) == inherited:
                        del sets[name][key]
            dumped["by_language"][language] = {**disabled, **sets}
        return dumped

    @field_validator(
        "rules", mode="before", json_schema_input_type=Rules | list[str | Rules]
    )
    @classmethod
    def _forms(cls, value: Any) -> Any:
        """Accept `[gopher_quality, {gopher_repetition: {...}}]` beside the plain
        mapping, and presets in both.
        """
        return expand(value)

    @field_validator("rule_sources", mode="before")
    @classmethod
    def _without_presets(cls, value: Any) -> Any:
        """Give the sources of a preset to the rule sets that it stands for."""
        if not isinstance(value, dict):
            return value
        return {
            rule_set: sources
            for name, sources in value.items()
            for rule_set in PRESETS.get(name, (name,))
        }

    @property
    def rule_sets(self) -> list[str]:
        """The rule sets that judge any document, in the order in which `Rules` declares
        them.
        """
        used = {
            name
            for rules in (self.rules, *self.by_language.values())
            for name in rules.sets
        }
        return [name for name in Rules.model_fields if name in used]

    def _problems(self) -> Iterator[str]:
        configured = self.rule_sets
        unknown = [name for name in self.rule_sources if name not in configured]
        if unknown:
            yield (
                f"rule_sources names {', '.join(unknown)}, but `rules` "
                f"has only {', '.join(configured)}"
            )
