"""Untrusted YAML: plain values, bounded in number and depth, and every refusal is an
error of YAML's own.
"""

from __future__ import annotations

import pytest
import yaml

from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.yaml_text import (
    MOST_VALUES,
    YamlLimitError,
    compose_yaml,
    parse_yaml,
)

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
"""Nine lines that stand for a billion values."""
REFUSED = [
    (LAUGHS, f"more than {MOST_VALUES} values", 6),
    ("a: 1\nb: &b {c: *b}\n", "contains itself", 2),
    ("a: 1\nb: &b [1, {c: *b}]\n", "contains itself", 2),
]


def test_values_and_aliases_are_read_as_by_pyyaml() -> None:
    text = "a: &a {b: 1, c: [x, 2.5, true, null]}\nd: {<<: *a, b: 2}\ne: *a\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None
    assert compose_yaml("") is None


@pytest.mark.parametrize(("text", "message", "line"), REFUSED)
def test_alias_bomb_or_cycle_is_rejected_at_its_line(
    text: str, message: str, line: int
) -> None:
    for read in (parse_yaml, compose_yaml):
        with pytest.raises(YamlLimitError, match=message) as error:
            read(text)
        assert error.value.problem_mark is not None
        assert error.value.problem_mark.line + 1 == line
    with pytest.raises(
        ManifestError, match=rf"m\.yaml:{line}: \(syntax\): not valid YAML: .*{message}"
    ):
        parse_manifest(text, "m.yaml")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "name: m\nsources:\n  a: {path: x}\n prepare: []\n",
            4,
            r"\(syntax\): .* another column .*; indent them alike",
        ),
        (
            "name\nsources: {}\n",
            2,
            r"\(syntax\): .*; give the line above its own colon",
        ),
        (
            "name: m\nsources:\n\ta: {path: x}\n",
            3,
            r"\(syntax\): .*a tab indents this line; use blanks",
        ),
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
def test_common_yaml_mistake_is_reported_with_the_fix(
    text: str, line: int, message: str
) -> None:
    with pytest.raises(ManifestError, match=rf"m\.yaml:{line}: {message}"):
        parse_manifest(text, "m.yaml")


@pytest.mark.slow
def test_deep_nesting_is_rejected_in_a_file_and_in_an_override() -> None:
    deep = "[" * 5000 + "]" * 5000
    for read in (parse_yaml, compose_yaml):
        with pytest.raises(YamlLimitError, match="too deeply"):
            read(deep)
    with pytest.raises(ManifestError, match=r"seed: .*too deeply"):
        parse_manifest("name: a\nsources: {a: {path: x}}\n", "m.yaml", [f"seed={deep}"])
