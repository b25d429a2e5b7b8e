"""Names that stand for several rule sets at once, and the forms in which a manifest may give rule sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

RuleSets = dict[str, dict[str, Any]]

_REFINEDWEB: RuleSets = {"gopher_quality": {"dialect": "dclm"}, "gopher_repetition": {"dialect": "dclm"}}
PRESETS: dict[str, RuleSets] = {"refinedweb": _REFINEDWEB, "dclm": _REFINEDWEB}
"""Preset -> the rule sets, and the values of them that are no defaults.

RefinedWeb as DCLM has it (baselines_configs/dclm_baseline_refinedweb.yaml): its rules for whole documents are Gopher's
with the thresholds of the paper, in DCLM's way of counting. Its rules for lines are `clean: {lines: [dclm]}`.
"""


def expand(rules: Any) -> Any:
    """Rule sets as a mapping of name to section, whatever form they were written in.

    A list has names, and mappings of a name to its values; a preset stands for its rule sets, and a mapping behind it
    changes them: `[{refinedweb: {gopher_quality: {min_words: 20}}}, fineweb]`.

    Raises:
        ValueError: an item is of another form, or a rule set is given twice.
    """
    if not isinstance(rules, list | dict):
        return rules
    expanded: dict[str, Any] = {}
    for name, values in _items(rules):
        for rule_set, section in _sets_of(name, values):
            if rule_set in expanded:
                raise ValueError(f"the rule set {rule_set!r} is given twice; put all its values in one place")
            expanded[rule_set] = section
    return expanded


def _items(rules: list[Any] | dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(rules, dict):
        yield from rules.items()
        return
    for item in rules:
        pairs = {item: {}} if isinstance(item, str) else item
        if not isinstance(pairs, dict):
            raise ValueError(f"a rule is a name or a mapping of one name to its thresholds, not {item!r}")
        for name, values in pairs.items():
            yield name, {} if values is None else values


def _sets_of(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    if name not in PRESETS:
        yield name, values
        return
    if values is None:
        return
    preset = PRESETS[name]
    unknown = values.keys() - preset.keys() if isinstance(values, Mapping) else {repr(values)}
    if unknown:
        raise ValueError(f"{name} stands for {', '.join(preset)}; it has no {', '.join(sorted(unknown))}")
    for rule_set, section in preset.items():
        yield rule_set, {**section, **(values.get(rule_set) or {})}


def add_to_schema(schema: dict[str, Any]) -> None:
    """Let the JSON schema of the rule sets know the presets."""
    for name, preset in PRESETS.items():
        schema["properties"][name] = {
            "description": f"Stands for {' and '.join(preset)}; values in here change theirs.",
            "anyOf": [
                {"type": "object", "additionalProperties": False,
                 "properties": {rule_set: schema["properties"][rule_set] for rule_set in preset}},
                {"type": "null"},
            ],
        }  # fmt: skip
