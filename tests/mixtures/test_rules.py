"""Rule sets of `filter` as lists, mappings and presets."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.rules import Rules


def rules(value: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = Filter.model_validate({"rules": value}).model_dump(
        mode="json"
    )["rules"]
    return dumped


def test_list_and_mapping_of_rule_sets_are_equivalent() -> None:
    assert rules(["fineweb", {"c4": {"min_sentences": 4}}, {"mc4": None}]) == rules(
        {"fineweb": {}, "c4": {"min_sentences": 4}, "mc4": {}}
    )


def test_recipe_holds_only_configured_rule_sets() -> None:
    assert list(rules(["fineweb"])) == ["fineweb"]
    assert list(rules({"fineweb": {}, "c4": None})) == ["fineweb"]
    assert Rules.model_validate(Rules().model_dump()) == Rules()


@pytest.mark.parametrize("preset", ["refinedweb", "dclm"])
def test_preset_expands_to_rule_sets_with_changed_thresholds(preset: str) -> None:
    written_out = {
        "gopher_quality": {"min_words": 20},
        "gopher_repetition": {},
        "fineweb": {},
    }
    assert rules([preset]) == rules(["gopher_quality", "gopher_repetition"])
    assert rules([{preset: {"gopher_quality": {"min_words": 20}}}, "fineweb"]) == rules(
        written_out
    )
    assert rules(
        {preset: {"gopher_quality": {"min_words": 20}}, "fineweb": {}}
    ) == rules(written_out)
    assert rules({preset: None, "fineweb": {}}) == rules(["fineweb"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([3], "name to its settings, not 3"),
        (["refinedweb", "gopher_quality"], "'gopher_quality' is given twice"),
        (["c4", {"c4": {"min_sentences": 1}}], "'c4' is given twice"),
        ([{"dclm": {"c4": {}}}], "dclm .*gopher_quality, gopher_repetition; .* c4"),
        ([{"dclm": 3}], "it has no 3"),
        ([{"dclm": {"gopher_quality": {"min_wrds": 3}}}], "min_wrds"),
        ({"fineweb": {"constants": "c4"}}, "'paper' or 'datatrove'"),
    ],
)
def test_invalid_rules_are_rejected(value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rules(value)


def test_rule_sources_name_configured_sets_or_presets() -> None:
    section = Filter.model_validate(
        {"rules": ["dclm", "code"], "rule_sources": {"dclm": ["web"], "code": ["git"]}}
    )
    assert section.rule_sources == {
        "gopher_quality": ("web",),
        "gopher_repetition": ("web",),
        "code": ("git",),
    }
    assert Filter.model_validate(section.model_dump(mode="json")) == section
    with pytest.raises(
        ValidationError, match="rule_sources names c4, but `rules` has only fineweb"
    ):
        Filter.model_validate({"rules": ["fineweb"], "rule_sources": {"c4": ["web"]}})


@pytest.mark.slow
def test_editor_schema_allows_lists_and_presets() -> None:
    definitions = Manifest.model_json_schema()["$defs"]
    assert [
        form.get("type")
        for form in definitions["Filter"]["properties"]["rules"]["anyOf"]
    ] == [None, "array"]
    by_language = definitions["Filter"]["properties"]["by_language"][
        "additionalProperties"
    ]
    assert by_language == {"anyOf": [{"$ref": "#/$defs/Rules"}, {"type": "null"}]}, (
        "`de:` alone has the general rules"
    )
    preset = definitions["Rules"]["properties"]["refinedweb"]["anyOf"][0]
    assert list(preset["properties"]) == ["gopher_quality", "gopher_repetition"]
