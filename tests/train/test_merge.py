"""Merged checkpoints: the mean, and rejected requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file

from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.scaling.merging import Merge
from gristmill.mixtures.schema.engine import Engine
from gristmill.train.models.weights import load_model
from gristmill.train.safe_loading import SafePlanner
from gristmill.train.stages.merge import MergeError


def test_impossible_merge_is_rejected_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"weights .*2.* steps .*3"):
        Merge(steps=(1, 2, 3), weights=(1.0, 2.0))
    with pytest.raises(ValueError, match="steps"):
        Merge(steps=(1,))
    with pytest.raises(ValueError, match="twice"):
        Merge(steps=(2, 2))


def test_manifest_must_keep_the_checkpoints_to_merge(tmp_path: Path) -> None:
    lines = {
        "name": "m",
        "sources": {"a": {"path": "a.txt"}},
        "tokenizer": {"vocab_size": 300},
        "mix": {"tokens": 2000, "sequence_length": 32},
        "pretrain": {"steps": 100},
    }

    def problems(**sections: Any) -> str:
        with pytest.raises(ManifestError) as error:
            parse_manifest(json.dumps({**lines, **sections}), str(tmp_path / "m.yaml"))
        return str(error.value)

    merge = {"steps": [60, 80, 100]}
    assert "merge: steps: 120 is after the last step, 100" in problems(
        merge={"steps": [60, 120]}
    )
    assert "export.weights" in problems(merge=merge, export={"weights": "average"})
    given_model = {
        "pretrain": None,
        "model": {"path": "given"},
        "sources": None,
        "mix": None,
        "tokenizer": None,
    }
    assert "`pretrain:`" in problems(merge=merge, **given_model)
    manifest = parse_manifest(
        json.dumps(
            {**lines, "merge": merge, "sft": {"data": [{"path": "c"}], "steps": 1}}
        ),
        str(tmp_path / "m.yaml"),
    )
    preflight = STAGES["merge"].preflight
    assert preflight is not None
    for saved, kept, missing in (
        (100, None, [60, 80]),
        (100, 20, [60, 80]),
        (10, 20, []),
        (10, 30, [80]),
        (30, 20, [80]),
    ):
        engine = Engine(checkpoint_every=saved, permanent_every=kept)
        configured = manifest.model_copy(update={"engine": engine})
        for step, (place, message) in zip(
            missing, preflight(configured, "merge", {}), strict=True
        ):
            assert place == ("merge", "steps")
            assert f"of step {step} " in message
            assert "engine.permanent_every" in message


@pytest.mark.slow
def test_merged_model_is_the_mean_of_its_checkpoints(
    run_stage: Callable[..., dict[str, Any]],
    stage_config: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    pretrain = {
        **pretrain_config,
        "schedule": {"decay_fraction": 0.5, "warmup_steps": 2},
    }
    run_stage(
        "pretrain",
        inputs,
        pretrain,
        tmp_path / "trained",
        checkpoint_every=3,
        permanent_every=3,
    )
    inputs["pretrain"] = tmp_path / "trained" / "data"
    config = stage_config(
        "merge",
        pretrain=pretrain,
        merge={"steps": [6, 9, 12], "weights": [1, 2, 3]},
    )
    assert (config["steps"], config["of"]) == ([6, 9, 12], 12)
    assert config["shares"] == [1 / 6, 2 / 6, 3 / 6]
    summary = run_stage("merge", inputs, config, tmp_path / "merged")

    merged_weights = load_file(
        tmp_path / "merged" / "data" / "model" / "model.safetensors"
    )
    last = load_file(inputs["pretrain"] / "model" / "model.safetensors")
    total = {name: last[name].astype(np.float64) * 3 for name in last}
    for step, weight in ((6, 1), (9, 2)):
        saved = {
            f"model.{name}": torch.empty(values.shape) for name, values in last.items()
        }
        checkpoint = tmp_path / "trained" / "work" / "checkpoints" / f"step-{step:08d}"
        dcp.load(saved, checkpoint_id=checkpoint, planner=SafePlanner(), no_dist=True)
        for name in last:
            total[name] += weight * saved[f"model.{name}"].numpy().astype(np.float64)
    assert merged_weights.keys() == last.keys()
    for name, values in merged_weights.items():
        assert values.dtype == np.float32
        # A mean is often halfway between two float32 numbers, and either is correct.
        np.testing.assert_array_max_ulp(values, (total[name] / 6).astype(np.float32), 1)

    assert summary["parameters"] == sum(values.size for values in last.values())
    load_model(tmp_path / "merged" / "data" / "model")

    shutil.rmtree(tmp_path / "trained" / "work" / "checkpoints" / "step-00000009")
    with pytest.raises(
        MergeError, match=r"no complete checkpoint of step 9 \(there are: 3, 6\)"
    ):
        run_stage("merge", inputs, config, tmp_path / "again")
