"""A tuning on longer rows than its model was trained on is told of before it runs."""

from __future__ import annotations

import pytest

from gristmill.mixtures.load import parse_manifest
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
        # What sft has taught is no news to those behind it.
        (["sft.sequence_length=512", "dpo.sequence_length=512", "rl.sequence_length=512"], ["sft"]),
        (["sft.sequence_length=512", "rl.sequence_length=512", "rl.start_from=pretrain"], ["sft", "rl"]),
        # A reward model is no start of reinforcement.
        (["reward.sequence_length=300", "rl.sequence_length=300"], ["reward", "rl"]),
        (["dpo.sequence_length=300", "rl.sequence_length=400"], ["dpo", "rl"]),
    ],
)
def test_a_tuning_warns_where_its_rows_are_longer_than_all_before(overrides: list[str], stages: list[str]) -> None:
    manifest = parse_manifest(MANIFEST, "/m/small.yaml", overrides)
    warnings = context_warnings(manifest, trained=256)
    assert list(warnings) == stages
    assert all(warning.startswith(f"{stage}: its rows have ") for stage, warning in warnings.items())


def test_the_warning_names_both_lengths_and_what_to_do() -> None:
    manifest = parse_manifest(MANIFEST, "/m/small.yaml", ["sft.sequence_length=512"])
    (warning,) = context_warnings(manifest, trained=256).values()
    assert "its rows have 512 tokens, but the model was trained on at most 256" in warning
    assert "lower sft.sequence_length, or stretch positions with pretrain.model.rope_scaling" in warning
