"""YAML of others: values alone, never more of them than anybody writes, and every refusal is an error of YAML's own."""

from __future__ import annotations

import pytest
import yaml

from gristmill.mixtures.load import ManifestError, parse_manifest
from gristmill.mixtures.yaml_text import MOST_VALUES, YamlLimitError, compose_yaml, parse_yaml

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
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


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (
            "name: m\nsources:\n  a: {path: x}\n prepare: []\n",
            4,
            r"\(syntax\): .* another column .*; indent them alike",
        ),
        ("name\nsources: {}\n", 2, r"\(syntax\): .*; give the line above its own colon"),
        ("name: m\nsources:\n\ta: {path: x}\n", 3, r"\(syntax\): .*a tab indents this line; use blanks"),
        ("name: 'm\nsources: {}\n", 3, r"\(syntax\): .* never closed; close it"),
        (
            "name: m\nsources:\n  a:\n  path: x\n",
            3,
            r"sources\.a: must be a mapping; indent its keys beneath it \(got None\)",
        ),
        (
            "name: m\nsources: {a: {path: x}}\nprepare:\n  filter: {}\n",
            3,
            "prepare: must be a list; begin each entry with `- `",
        ),
    ],
)
def test_the_commonest_slips_of_beginners_are_answered_with_what_to_do(text: str, line: int, said: str) -> None:
    with pytest.raises(ManifestError, match=rf"m\.yaml:{line}: {said}"):
        parse_manifest(text, "m.yaml")


def test_what_is_nested_too_deeply_is_refused_in_the_file_and_in_a_setting() -> None:
    deep = "[" * 5000 + "]" * 5000
    for read in (parse_yaml, compose_yaml):
        with pytest.raises(YamlLimitError, match="too deeply"):
            read(deep)
    with pytest.raises(ManifestError, match=r"seed: .*too deeply"):
        parse_manifest("name: a\nsources: {a: {path: x}}\n", "m.yaml", [f"seed={deep}"])
