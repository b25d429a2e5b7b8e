"""The section `rl`: what it means by default, and what it refuses before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.mixtures.load import ManifestError, load_manifest
from gristmill.mixtures.reinforcement import Rl

LEAST: dict[str, Any] = {"data": [{"path": "a.jsonl"}], "rewards": [{"kind": "exact"}], "steps": 2}
MANIFEST = """
name: small
sources: {prose: {path: "*.txt"}}
tokenizer:
mix: {}
pretrain: {steps: 2}
"""


def test_the_estimator_follows_from_the_algorithm() -> None:
    assert Rl.model_validate(LEAST).kl_kind == "k3"
    assert Rl.model_validate({**LEAST, "algorithm": "ppo"}).kl_kind == "k1"
    assert Rl.model_validate({**LEAST, "kl_estimator": "k2"}).kl_kind == "k2"


def test_a_batch_of_answers_is_shared_out_to_steps_and_gone_through_again() -> None:
    section = Rl.model_validate({**LEAST, "global_batch_size": 16, "steps_per_batch": 3, "epochs_per_batch": 2})
    assert (section.rollouts_per_batch, section.updates_per_batch) == (48, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "compares the answers to a prompt with one another"),
        ({"group_size": 8, "global_batch_size": 20}, "not whole groups"),
        ({"rewards": [{"kind": "exact"}, {"kind": "exact"}]}, "two are called exact"),
        ({"rewards": []}, "at least 1 item"),
        ({"kl_estimator": "k1", "kl_correction": False}, "its gradient is zero on average"),
        ({"optimizer": {"kind": "sophia"}}, "a reward has none"),
        ({"schedule": {"warmup_tokens": 100}}, "set warmup_steps"),
        ({"spikes": {"rollback_after": 2}}, "rolling back would leave"),
        ({"tools": ["calculator", {"python": {}, "name": "calculator"}]}, "rl.tools: two are called calculator"),
        ({"curriculum": {}, "algorithm": "ppo", "group_size": 1}, "needs a group_size of 2 or more"),
        ({"curriculum": {"between": [0.5, 0.5]}}, "the first must be below the second"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Rl.model_validate({**LEAST, **changes})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "{steps: 1, data: [{path: a.jsonl}], rewards: [{kind: exact}], start_from: dpo}",
            "needs a section `dpo:` too",
        ),
        ("{steps: 1, data: [{path: a.jsonl}], rewards: [{kind: model}]}", "has no `path`, and there is no section"),
        (
            "{steps: 1, data: [{path: a.jsonl}], rewards: [{kind: length, txt: 3}]}",
            "unknown key; known here: kind, name, target_tokens, weight",
        ),
    ],
)
def test_what_another_section_must_make_is_missed(section: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(f"{MANIFEST}rl: {section}\n")
    with pytest.raises(ManifestError, match=message):
        load_manifest(path)


def test_a_search_without_a_path_needs_documents(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(
        "name: small\nmodel: {path: tuned}\n"
        "rl: {steps: 1, data: [{path: a.jsonl}], rewards: [{kind: exact}], tools: [search]}\n"
    )
    with pytest.raises(ManifestError, match="no section `sources:` whose documents it finds"):
        load_manifest(path)


def test_a_tool_says_what_it_does_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def told():\n    'It tells.'\n\n\ndef silent(): pass\n")
    path = tmp_path / "small.yaml"
    for name in ("told", "silent"):
        path.write_text(
            "name: small\nmodel: {path: tuned}\nrl: {steps: 1, data: [{path: a.jsonl}], "
            f"rewards: [{{kind: exact}}], tools: [{{use: ./own.py:{name}}}]}}\n"
        )
        if name == "told":
            (tool,) = load_manifest(path).rl.tools  # type: ignore[union-attr]
            assert tool.use.called == "told"  # type: ignore[union-attr]
            continue
        with pytest.raises(ManifestError, match=r"own.py, line 5: silent has no docstring"):
            load_manifest(path)
