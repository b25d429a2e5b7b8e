"""Phases of a training: learning rate, row length and rotary positions in each, and
their metrics.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.batch_plan import PlanError, plan_of
from gristmill.train.models.weights import read_shape
from tests.jsonl import read_metrics
from tests.train.trained import assert_same_output, weights_of

PHASES = [{}, {"learning_rate_scale": 0.5, "sequence_length": 16}]


@pytest.fixture
def inputs(tokenizer_folder: Path, mix_folder: Path, tmp_path: Path) -> dict[str, Path]:
    """A packed set with phases of 24 rows of the first source and 56 of both, for steps
    of 6 rows.
    """
    phased, packed = tmp_path / "staged", PackedSet(mix_folder)
    shutil.copytree(mix_folder, phased)
    train = {**packed.manifest["train"], "stages": [[24, 0], [16, 40]]}
    (phased / "packed.json").write_text(
        json.dumps({**packed.manifest, "format": 5, "train": train})
    )
    return {"tokenizer": tokenizer_folder, "mix": phased}


def test_phase_starts_at_the_first_step_within_its_rows() -> None:
    section = Pretrain.model_validate(
        {"steps": 9, "global_batch_size": 4, "phases": PHASES}
    )
    plan = plan_of(section, 32, [10, 36])
    assert plan.phases == (0, 3)  # steps of 4 rows: the third starts before row 10
    assert [plan.cuts_in_step(step) for step in range(5)] == [1, 1, 1, 2, 2]
    assert [plan.phase_of(step) for step in range(5)] == [0, 0, 0, 1, 1]
    assert plan_of(section, 32).phases == (0,)
    with pytest.raises(
        PlanError, match=r"pretrain\.phases: sequence_length 16 .* 40 tokens"
    ):
        plan_of(section, 40, [10, 36])


@pytest.mark.slow
def test_each_phase_has_its_rate_row_length_and_metrics_also_after_a_resume(
    run_stage: Any,
    stop_pretraining: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {
        **pretrain_config,
        "steps": 6,
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "phases": PHASES,
    }
    run_stage("pretrain", inputs, config, tmp_path / "whole")
    lines = read_metrics(tmp_path / "whole")
    rates = {
        line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line
    }
    assert rates == {**dict.fromkeys((1, 2, 3, 4), 0.01), 5: 0.005, 6: 0.005}
    assert [line for line in lines if "phase" in line] == [
        {
            "step": 1,
            "phase": {
                "number": 1,
                "of": 2,
                "shares": {"prose": 1.0},
                "learning_rate_scale": 1.0,
            },
        },
        {
            "step": 5,
            "phase": {
                "number": 2,
                "of": 2,
                "shares": {"prose": 16 / 56, "code": 40 / 56},
                "learning_rate_scale": 0.5,
                "sequence_length": 16,
            },
        },
    ]
    predicted = {
        line["step"]: sum(part["tokens"] for part in line["sources"].values())
        for line in lines
        if "loss" in line
    }
    assert predicted == {**dict.fromkeys((1, 2, 3, 4), 6 * 31), 5: 12 * 15, 6: 12 * 15}

    stop_pretraining(inputs, config, tmp_path / "stopped", times=5)
    run_stage("pretrain", inputs, config, tmp_path / "stopped")
    resumed = read_metrics(tmp_path / "stopped")
    assert [line for line in resumed if "phase" in line] == [
        line for line in lines if "phase" in line
    ]
    assert_same_output(tmp_path / "stopped", tmp_path / "whole")


LONG = {
    "rope_theta": 80_000.0,
    "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_length": 16},
}


@pytest.mark.slow
def test_phase_changes_rotary_positions_from_its_first_step(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Phase 2 starts at step 5, like a model with its positions that continues the
    checkpoint of step 4.
    """
    config = {**pretrain_config, "steps": 6, "phases": [{}, LONG]}
    run_stage("pretrain", inputs, config, tmp_path / "phased", permanent_every=4)
    resumed = {
        **config,
        "continue_from": str(
            tmp_path / "phased" / "work" / "checkpoints" / "step-00000004"
        ),
    }
    run_stage("pretrain", inputs, resumed, tmp_path / "resumed")
    peer = {**resumed, "phases": [{}, {}], "model": {**config["model"], **LONG}}
    run_stage("pretrain", inputs, peer, tmp_path / "peer")
    run_stage("pretrain", inputs, {**config, "phases": [{}, {}]}, tmp_path / "plain")
    for name in ("peer", "resumed"):
        assert_same_output(tmp_path / name, tmp_path / "phased")
    phased, plain = (
        weights_of(tmp_path / name)["model.embed_tokens.weight"]
        for name in ("phased", "plain")
    )
    assert not torch.equal(phased, plain)
    shape, *others = (
        read_shape(tmp_path / name / "data" / "model")
        for name in ("phased", "peer", "resumed")
    )
    assert others == [shape, shape]
    assert shape.rope_theta == 80_000.0
    losses = {
        name: {
            line["step"]: line["loss"]
            for line in read_metrics(tmp_path / name)
            if "loss" in line
        }
        for name in ("phased", "plain")
    }
    assert [
        step for step in range(1, 7) if losses["phased"][step] != losses["plain"][step]
    ] == [5, 6]


MANIFEST = """
name: p
sources: {{a: {{path: "a.txt"}}}}
tokenizer: {{vocab_size: 300}}
mix: {{tokens: 64000, sequence_length: 32, phases: [{{end: 0.5}}, {{}}]}}
pretrain: {{steps: 10, {pretrain}}}
"""


def test_inconsistent_phases_are_rejected_before_any_work() -> None:
    with pytest.raises(ManifestError, match=r"pretrain\.phases: .*1 .*mix\.phases .*2"):
        parse_manifest(MANIFEST.format(pretrain="phases: [{}]"), "p.yaml")
    with pytest.raises(ManifestError, match="rope_theta and rope_scaling"):
        parse_manifest(
            MANIFEST.format(pretrain="phases: [{}, {rope_theta: 5e5}], masked: {}"),
            "p.yaml",
        )
    with pytest.raises(
        ManifestError, match="length_ramp and the sequence_length of phases"
    ):
        parse_manifest(
            MANIFEST.format(
                pretrain="phases: [{}, {sequence_length: 16}], length_ramp: "
                "[{until_step: 2, sequence_length: 16}]"
            ),
            "p.yaml",
        )
