"""Merged checkpoints: selection, weights, the mean, and rejected requests."""

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

from gristmill.core.files import read_json
from gristmill.flows.pages.page_elements import Table
from gristmill.flows.report.evaluation import merged
from gristmill.flows.stages.registry import STAGES
from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.scaling.merging import Merge, merge_problems, merged_steps
from gristmill.mixtures.schema.evaluation import Evaluate
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.models.weights import load_model
from gristmill.train.safe_loading import SafePlanner
from gristmill.train.stages.evaluate import measure_sources
from gristmill.train.stages.merge import MergeError
from tests.flows.rendered import facts_of

WSD = {"steps": 100, "schedule": {"decay_fraction": 0.2}}


@pytest.mark.parametrize(
    ("merge", "training", "steps"),
    [
        ({"last": 3, "every": 20}, WSD, [40, 60, 80]),
        ({"last": 2, "every": 30, "until": "end"}, WSD, [60, 90]),
        (
            {"last": 2, "every": 50},
            {"steps": 100, "schedule": {"kind": "constant"}},
            [50, 100],
        ),
    ],
)
def test_last_checkpoints_before_the_decay_or_the_end_are_merged(
    merge: dict[str, Any], training: dict[str, Any], steps: list[int]
) -> None:
    assert (
        merged_steps(Merge.model_validate(merge), Pretrain.model_validate(training))
        == steps
    )


def test_shares_are_normalised_weights() -> None:
    assert Merge(last=4, every=1).shares == [0.25] * 4
    assert Merge(last=3, every=1, weights="linear").shares == [1 / 6, 2 / 6, 3 / 6]
    assert Merge(last=2, every=1, weights=(3.0, 1.0)).shares == [0.75, 0.25]


def test_impossible_merge_is_rejected_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"weights .*2.* last .*3"):
        Merge(last=3, every=1, weights=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"cosine.*until: end"):
        merged_steps(
            Merge(last=2, every=10),
            Pretrain.model_validate({"steps": 100, "schedule": {"kind": "cosine"}}),
        )
    with pytest.raises(ValueError, match=r"80 steps .* 2 .* 30"):
        merged_steps(Merge(last=3, every=30), Pretrain.model_validate(WSD))
    assert merge_problems(10, 20, 40) is None
    for saved, permanent, every in ((10, None, 40), (30, 20, 40), (10, 30, 40)):
        assert "engine.permanent_every" in str(merge_problems(saved, permanent, every))


def test_manifest_must_keep_the_checkpoints_to_merge(tmp_path: Path) -> None:
    lines = {
        "name": "m",
        "sources": {"a": {"path": "a.txt"}},
        "tokenizer": {"vocab_size": 300},
        "mix": {"tokens": 2000, "sequence_length": 32},
        "pretrain": WSD,
    }

    def problems(**sections: Any) -> str:
        with pytest.raises(ManifestError) as error:
            parse_manifest(json.dumps({**lines, **sections}), str(tmp_path / "m.yaml"))
        return str(error.value)

    merge = {"last": 3, "every": 20}
    assert "merge: of the" not in problems(merge={**merge, "weights": [1]})
    assert "merge: last: 5 checkpoints, 20 steps apart" in problems(
        merge={"last": 5, "every": 20}
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
    ((place, message),) = STAGES["merge"].preflight(manifest, "merge", {})  # type: ignore[misc]
    assert place == ("merge", "every")
    assert "engine.permanent_every (now absent) to 20" in message


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
        merge={"last": 3, "every": 3, "until": "end", "weights": "linear"},
    )
    assert (config["steps"], config["of"]) == ([6, 9, 12], 12)
    config["bootstrap_samples"] = 20
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

    models = read_json(tmp_path / "merged" / "data" / "merged.json")["models"]
    assert [entry["model"] for entry in models] == [
        "step 6",
        "step 9",
        "step 12",
        "merged",
        "step 12, the last",
    ]
    assert [entry["share"] for entry in models] == [1 / 6, 2 / 6, 3 / 6, None, None]
    sources_by_model = {entry["model"]: entry["sources"] for entry in models}
    assert (
        sources_by_model["step 12"]
        == sources_by_model["step 12, the last"]
        != sources_by_model["step 9"]
    )
    section = merged(facts_of(merged={"models": models}), "merge")
    assert section is not None
    table = section.parts[0]
    assert isinstance(table, Table)
    assert [row[:3] for row in table.rows[2:4]] == [
        ["step 9", "33.3%", "code"],
        ["step 9", "33.3%", "prose"],
    ]
    assert table.rows[6][3].startswith(
        f"{sources_by_model['merged']['code']['bits_per_byte']:.4f} ["
    )
    again = measure_sources(
        load_model(tmp_path / "merged" / "data" / "model"),
        PackedSet(mix_folder),
        tokenizer_folder,
        Evaluate(seed=config["seed"], bootstrap_samples=20),
    )
    assert sources_by_model["merged"] == summary["sources"] == again

    shutil.rmtree(tmp_path / "trained" / "work" / "checkpoints" / "step-00000009")
    with pytest.raises(
        MergeError, match=r"no complete checkpoint of step 9 \(there are: 3, 6\)"
    ):
        run_stage("merge", inputs, config, tmp_path / "again")
