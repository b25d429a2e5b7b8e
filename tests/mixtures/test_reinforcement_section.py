"""Defaults and checks of the section `rl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.mixtures.loader import ManifestError, load_manifest
from gristmill.mixtures.schema.rl import Rl

MINIMAL: dict[str, Any] = {
    "data": [{"path": "a.jsonl"}],
    "rewards": [{"kind": "exact"}],
    "steps": 2,
}
MANIFEST = """
name: small
sources: {prose: {path: "*.txt"}}
tokenizer:
mix: {}
pretrain: {steps: 2}
"""


def test_batch_of_answers_is_split_into_steps_and_repeated_by_epochs() -> None:
    section = Rl.model_validate(
        {
            **MINIMAL,
            "global_batch_size": 16,
            "steps_per_batch": 3,
            "epochs_per_batch": 2,
        }
    )
    assert (section.rollouts_per_batch, section.updates_per_batch) == (48, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "group_size"),
        ({"group_size": 8, "global_batch_size": 20}, "global_batch_size .*20.*8"),
        ({"rewards": [{"kind": "exact"}, {"kind": "exact"}]}, "two are called exact"),
        ({"rewards": []}, "at least 1 item"),
        ({"kl_estimator": "k1", "kl_correction": False}, "kl_correction"),
        (
            {"tools": ["python", {"use": "./own.py:look", "name": "python"}]},
            "rl.tools: two are called python",
        ),
        (
            {
                "curriculum": {},
                "algorithm": "distill",
                "teacher": "teacher",
                "group_size": 1,
            },
            "needs a group_size of 2 or more",
        ),
        ({"curriculum": {"between": [0.5, 0.5]}}, "between"),
        ({"beta": 0.04}, "rl.kl_weight"),
        (
            {"algorithm": "distill", "teacher": "teacher", "ratio": "sequence"},
            "rl.ratio",
        ),
    ],
)
def test_contradicting_settings_are_rejected(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Rl.model_validate({**MINIMAL, **changes})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "{steps: 1, data: [{path: a.jsonl}], rewards: [{kind: exact}], "
            "start_from: dpo}",
            "needs a section `dpo:` too",
        ),
        (
            "{steps: 1, data: [{path: a.jsonl}], rewards: [{kind: model}]}",
            "has no `path`.* no section `reward",
        ),
        (
            "{steps: 1, data: [{path: a.jsonl}], rewards: [{kind: length, txt: 3}]}",
            "unknown key; known here: kind, name, target_tokens, weight",
        ),
    ],
)
def test_missing_section_and_unknown_reward_key_are_rejected(
    section: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(f"{MANIFEST}rl: {section}\n")
    with pytest.raises(ManifestError, match=message):
        load_manifest(path)


def test_tool_needs_a_docstring(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def documented():\n    'It tells.'\n\n\ndef silent(): pass\n"
    )
    path = tmp_path / "small.yaml"
    text = (
        "name: small\nmodel: {path: tuned}\nrl: {steps: 1, data: [{path: a.jsonl}], "
        "rewards: [{kind: exact}], tools: [{use: ./own.py:%s}]}\n"
    )
    path.write_text(text % "documented")
    (tool,) = load_manifest(path).rl.tools  # type: ignore[union-attr]
    assert tool.use.called == "documented"  # type: ignore[union-attr]
    path.write_text(text % "silent")
    with pytest.raises(ManifestError, match=r"own.py, line 5: silent has no docstring"):
        load_manifest(path)
