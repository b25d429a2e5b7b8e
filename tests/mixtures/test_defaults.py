"""Defaults are per key and per section: setting one key changes no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.manifest import Manifest
from tests.ci_scripts import load_script

alternatives = load_script("manifest_reference").alternatives

MANIFEST = """
name: small
sources: {prose: {path: "*.txt"}, web: {path: "*.html"}}
prepare: [clean, filter, dedup, dedup_lines, dedup_substrings, langid, {quality: {classifier: {positive: [prose],
  negative: [web]}}}, {decontaminate: {against: [{path: a.jsonl}]}}]
documents: {}
tokenizer: {}
mix: {tokens: 1000}
text_index: {}
pretrain: {steps: 400}
sft: {steps: 400, data: [{path: a.jsonl}], distill: {teacher: pretrain}}
reward: {steps: 400, data: [{path: a.jsonl}]}
dpo: {steps: 400, data: [{path: a.jsonl}]}
rl: {steps: 400, data: [{path: a.jsonl}], rewards: [{kind: exact}]}
evaluate: {}
export: {}
"""
TRAININGS = ("pretrain", "sft", "reward", "dpo", "rl")


def parsed(*overrides: str) -> Manifest:
    return parse_manifest(MANIFEST, "/m/small.yaml", overrides)


def keys_of(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key by its path, as `--set` takes it, with its value."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            inner = getattr(value, name)
            if field.exclude or (
                at.startswith("prepare.") and at.count(".") == 1 and inner is None
            ):
                continue
            yield from keys_of(inner, f"{at}.{name}" if at else name)
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        for index, inner in enumerate(value):
            yield from keys_of(inner, f"{at}.{index}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from keys_of(inner, f"{at}.{name}")
    else:
        yield at, value


def optional_sections(model: BaseModel, at: str) -> Iterator[str]:
    """Paths of the absent sections inside one that take `{}`."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from optional_sections(value, f"{at}.{name}")
        elif value is None:
            for part in alternatives(field.annotation):
                if (
                    isinstance(part, type)
                    and issubclass(part, BaseModel)
                    and not any(
                        inner.is_required() for inner in part.model_fields.values()
                    )
                ):
                    yield f"{at}.{name}"


def different_value(annotation: Any, value: Any) -> Any:
    """Return another value of the same type, or None."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 2 + 1
    if isinstance(value, float):
        return value / 2 or 0.25
    for part in alternatives(annotation):
        if isinstance(value, str) and get_origin(part) is Literal:
            return next((choice for choice in get_args(part) if choice != value), None)
    return None


def field_of(manifest: Manifest, path: str) -> Any:
    """Return the annotation of the key at a path."""
    at: Any = manifest
    *parents, last = path.split(".")
    for part in parents:
        at = (
            at[int(part)]
            if isinstance(at, tuple)
            else at[part]
            if isinstance(at, dict)
            else getattr(at, part)
        )
    return type(at).model_fields[last].annotation if isinstance(at, BaseModel) else None


def set_to(path: str, value: Any) -> str:
    json_value = list(value) if isinstance(value, tuple) else value
    return f"{path}={json.dumps(json_value)}"


def as_override(path: str, manifest: Manifest) -> str:
    """Address a path below `prepare` by the name of its stage, as `--set` does."""
    parts = path.split(".")
    return ".".join(["prepare", *parts[2:]]) if parts[0] == "prepare" else path


@pytest.mark.slow
def test_setting_a_key_to_its_default_changes_nothing() -> None:
    manifest = parsed()
    paths = [(as_override(path, manifest), value) for path, value in keys_of(manifest)]
    assert len(paths) > 500
    changed = [
        path
        for path, value in paths
        if parsed(set_to(path, value)).model_dump() != manifest.model_dump()
    ]
    assert changed == []


@pytest.mark.slow
@pytest.mark.parametrize("section", TRAININGS)
def test_setting_one_key_of_a_training_changes_no_other(section: str) -> None:
    manifest = parsed()
    before = dict(keys_of(manifest))
    tried = 0
    for path, value in before.items():
        new_value = different_value(field_of(manifest, path), value)
        if not path.startswith(f"{section}.") or new_value is None:
            continue
        try:
            after = dict(keys_of(parsed(set_to(path, new_value))))
        except ManifestError:
            continue  # A value that other keys forbid.
        tried += 1
        assert {
            key
            for key in before.keys() | after.keys()
            if before.get(key) != after.get(key)
        } == {path}
    assert tried > 20


@pytest.mark.parametrize("section", TRAININGS)
def test_setting_one_key_of_an_absent_section_adds_the_section_with_its_defaults(
    section: str,
) -> None:
    manifest = parsed()
    absent_sections = list(optional_sections(getattr(manifest, section), section))
    assert f"{section}.average" in absent_sections
    for section_path in absent_sections:
        try:
            with_section = parsed(f"{section_path}={{}}")
        except ManifestError:
            # Later tunings need a generative model, the tokenizer special tokens, and
            # the endpoint an address.
            assert section_path in (
                "rl.teacher_endpoint",
                "pretrain.masked",
                "pretrain.span_corruption",
                "pretrain.ul2",
                "pretrain.blank_infilling",
            )
            continue
        for path, value in keys_of(with_section):
            if path.startswith(f"{section_path}."):
                assert (
                    parsed(set_to(path, value)).model_dump()
                    == with_section.model_dump()
                ), path


def test_setting_a_threshold_of_one_default_rule_set_keeps_the_other() -> None:
    changed = parsed("filter.gopher_quality.min_words=40").prepare[1].filter
    assert changed is not None
    assert changed.rules.gopher_quality is not None
    assert (
        changed.rules.gopher_quality.min_words,
        changed.rules.gopher_repetition is not None,
    ) == (40, True)


def test_each_training_has_its_own_default_rates() -> None:
    manifest = parsed(
        *(f"{section}.optimizer.clip_norm=0.5" for section in TRAININGS),
        "rl.spikes.window=64",
    )
    sections = [getattr(manifest, section) for section in TRAININGS]
    assert [training.optimizer.learning_rate for training in sections] == [
        1e-3,
        3e-4,
        1e-4,
        5e-5,
        1e-6,
    ]
    assert [training.optimizer.weight_decay for training in sections] == [
        0.1,
        0.0,
        0.0,
        0.0,
        0.0,
    ]
    assert manifest.rl is not None
    assert manifest.rl.spikes.sigma is None
