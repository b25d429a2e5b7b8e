"""The warning before a tuning on rows that are longer than those that its model was
trained on.
"""

from __future__ import annotations

import re

import pytest

from gristmill.mixtures.loader import parse_manifest
from gristmill.mixtures.manifest import context_warnings

MANIFEST = """
name: small
sources: {prose: {path: "*.txt"}}
tokenizer: {}
mix: {tokens: 1000, sequence_length: 256}
pretrain: {steps: 4}
sft: {steps: 4, data: [{path: a.jsonl}]}
dpo: {steps: 4, data: [{path: a.jsonl}]}
reward: {steps: 4}
rl: {steps: 4, data: [{path: a.jsonl}], rewards: [{kind: exact}]}
"""


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        ([], []),
        (["sft.sequence_length=256", "rl.sequence_length=128"], []),
        (["sft.sequence_length=512"], ["sft"]),
        # Stages after sft start from its weights, and need no second warning.
        (
            [
                "sft.sequence_length=512",
                "dpo.sequence_length=512",
                "rl.sequence_length=512",
            ],
            ["sft"],
        ),
        (
            [
                "sft.sequence_length=512",
                "rl.sequence_length=512",
                "rl.start_from=pretrain",
            ],
            ["sft", "rl"],
        ),
        # `rl` does not start from the reward model.
        (["reward.sequence_length=300", "rl.sequence_length=300"], ["reward", "rl"]),
        (["dpo.sequence_length=300", "rl.sequence_length=400"], ["dpo", "rl"]),
    ],
)
def test_tuning_on_longer_rows_than_every_earlier_stage_is_warned_about(
    overrides: list[str], stages: list[str]
) -> None:
    manifest = parse_manifest(MANIFEST, "/m/small.yaml", overrides)
    warnings = context_warnings(manifest, trained=256)
    assert list(warnings) == stages
    assert all(
        warning.startswith(f"{stage}: its rows have ")
        for stage, warning in warnings.items()
    )


def test_warning_names_both_lengths_and_the_keys_to_change() -> None:
    manifest = parse_manifest(MANIFEST, "/m/small.yaml", ["sft.sequence_length=512"])
    (warning,) = context_warnings(manifest, trained=256).values()
    assert re.findall(r"\d+", warning) == ["512", "256"]
    assert {"sft.sequence_length", "pretrain.model.rope_scaling"} <= set(
        re.findall(r"[\w.]+\.\w+", warning)
    )
