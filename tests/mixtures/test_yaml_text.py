"""YAML of others: values alone, never more of them than anybody writes, and every refusal is an error of YAML's own."""

from __future__ import annotations

import pytest
import yaml

from gristmill.mixtures.load import ManifestError, parse_manifest
from gristmill.mixtures.yaml_text import MOST_VALUES, YamlLimitError, compose_yaml, parse_yaml

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
"""Nine lines that stand for a billion values."""
REFUSED = [
    (LAUGHS, f"more than {MOST_VALUES} values", 6),
    ("a: 1\nb: &b {c: *b}\n", "contains itself", 2),
    ("a: 1\nb: &b [1, {c: *b}]\n", "contains itself", 2),
]


def test_values_and_aliases_are_read_as_yaml_has_them() -> None:
    text = "a: &a {b: 1, c: [x, 2.5, true, null]}\nd: {<<: *a, b: 2}\ne: *a\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None
    assert compose_yaml("") is None


@pytest.mark.parametrize(("text", "why", "line"), REFUSED)
def test_what_stands_for_too_much_is_refused_at_its_line(text: str, why: str, line: int) -> None:
    for read in (parse_yaml, compose_yaml):
        with pytest.raises(YamlLimitError, match=why) as told:
            read(text)
        assert told.value.problem_mark is not None
        assert told.value.problem_mark.line + 1 == line
    with pytest.raises(ManifestError, match=rf"m\.yaml:{line}: \(syntax\): not valid YAML: .*{why}"):
        parse_manifest(text, "m.yaml")


def test_what_is_nested_too_deeply_is_refused_in_the_file_and_in_a_setting() -> None:
    deep = "[" * 5000 + "]" * 5000
    for read in (parse_yaml, compose_yaml):
        with pytest.raises(YamlLimitError, match="too deeply"):
            read(deep)
    with pytest.raises(ManifestError, match=r"seed: .*too deeply"):
        parse_manifest("name: a\nsources: {a: {path: x}}\n", "m.yaml", [f"seed={deep}"])
