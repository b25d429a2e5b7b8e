"""Training continued from another training's checkpoint, on a set without some of its
rows.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.core.files import read_json, sha256_file, write_json
from gristmill.tokenize.packed import PackedSet
from gristmill.train import trainer
from gristmill.train.loop.batch_plan import extend_digest
from gristmill.train.resuming import ContinueError
from tests.jsonl import read_metrics
from tests.train.trained import assert_same_output, weights_of

SEED, BATCH, STEPS = 11, 6, 12


def without_row(mix: Path, target: Path, row: int) -> PackedSet:
    """Copy a packed set, with one row blanked and withheld."""
    shutil.copytree(mix, target)
    manifest = read_json(target / "packed.json")
    (shard,) = manifest["train"]["shards"]
    tokens = np.memmap(target / shard["file"], "<u2", "r+", shape=(80, 32))
    tokens[row] = 0
    tokens.flush()
    shard.update(
        withheld=[row],
        whole_sha256=shard["sha256"],
        sha256=sha256_file(target / shard["file"]),
    )
    write_json(target / "packed.json", manifest)
    return PackedSet(target)


def lines_of(folder: Path) -> dict[int, dict[str, Any]]:
    lines = read_metrics(folder)
    return {line["step"]: line for line in lines if "loss" in line}


@pytest.mark.slow
def test_training_continues_from_a_clean_checkpoint_without_the_withheld_rows(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {
        **pretrain_config,
        "steps": STEPS,
        "seed": SEED,
        "global_batch_size": BATCH,
    }
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage("pretrain", inputs, config, tmp_path / "first", checkpoint_every=4)
    checkpoints = tmp_path / "first" / "work" / "checkpoints"
    full_set = PackedSet(mix_folder)
    # step 6 reads it
    withheld_row = int(full_set.order(SEED).rows(np.arange(5 * BATCH, 6 * BATCH))[2])
    reduced_set = without_row(mix_folder, tmp_path / "less", withheld_row)
    assert reduced_set.fingerprint == full_set.fingerprint

    inputs["mix"] = reduced_set.folder
    clean = {**config, "continue_from": str(checkpoints / "step-00000004")}
    summary = run_stage(
        "pretrain", inputs, clean, tmp_path / "second", checkpoint_every=4
    )
    before, after = lines_of(tmp_path / "first"), lines_of(tmp_path / "second")
    assert sorted(after) == list(range(5, STEPS + 1))
    assert after[5]["loss"] == before[5]["loss"]
    read, digest = (
        reduced_set.order(SEED).rows(np.arange(STEPS * BATCH)).reshape(STEPS, BATCH),
        reduced_set.fingerprint,
    )
    for step in range(1, STEPS + 1):
        digest = extend_digest(digest, read[step - 1])
        if step in after:
            assert after[step]["rows_digest"] == digest
    assert summary["rows_digest"] == digest
    assert withheld_row not in read
    uninterrupted = full_set.order(SEED).rows(np.arange(STEPS * BATCH + 1)).tolist()
    assert read.ravel().tolist() == [
        row for row in uninterrupted if row != withheld_row
    ]

    tainted = {**config, "continue_from": str(checkpoints / "step-00000008")}
    with pytest.raises(ContinueError, match=r"step-00000008 .* 8 steps"):
        run_stage("pretrain", inputs, tainted, tmp_path / "third")
    torch.distributed.destroy_process_group()  # a failed stage leaves its process group
    (checkpoints / "step-00000004" / "complete.json").unlink()
    with pytest.raises(ContinueError, match="step-00000004"):
        run_stage("pretrain", inputs, clean, tmp_path / "fourth")


@pytest.mark.slow
def test_stopped_training_resumes_with_other_micro_batches_and_intervals(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    config = {**pretrain_config, "micro_batch_size": 6}
    run_stage("pretrain", inputs, config, tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr("gristmill.train.loop.step.stop_requested", lambda: True)
        with pytest.raises(trainer.StoppedError):
            run_stage("pretrain", inputs, config, tmp_path / "less")
    torch.distributed.destroy_process_group()
    changes = {"micro_batch_size": 2, "validate_every": 5}
    run_stage("pretrain", inputs, {**config, **changes}, tmp_path / "less")
    uninterrupted, resumed = lines_of(tmp_path / "whole"), lines_of(tmp_path / "less")
    assert sorted(resumed) == sorted(uninterrupted) == list(range(1, STEPS + 1))
    for step, line in resumed.items():
        assert line["rows_digest"] == uninterrupted[step]["rows_digest"]
        assert line["loss"] == pytest.approx(uninterrupted[step]["loss"], abs=1e-4)
    whole, less = weights_of(tmp_path / "whole"), weights_of(tmp_path / "less")
    torch.testing.assert_close(less, whole, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_finished_training_is_extended_with_the_same_bits(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    config = {
        **pretrain_config,
        "schedule": {"kind": "wsd", "warmup_steps": 2, "decay_fraction": 0.25},
    }
    run_stage("pretrain", inputs, config, tmp_path / "short", permanent_every=8)
    assert read_json(tmp_path / "short" / "work" / "kept.json") == [
        "checkpoints/step-00000008"
    ]
    longer = {**config, "steps": 20}
    run_stage("pretrain", inputs, longer, tmp_path / "whole")
    checkpoint = tmp_path / "short" / "work" / "checkpoints" / "step-00000008"
    run_stage(
        "pretrain",
        inputs,
        {**longer, "continue_from": str(checkpoint)},
        tmp_path / "longer",
    )
    assert sorted(lines_of(tmp_path / "longer")) == list(range(9, 21))
    assert_same_output(tmp_path / "longer", tmp_path / "whole")
    with pytest.raises(ContinueError, match=r"8 steps .* 6;"):
        run_stage(
            "pretrain",
            inputs,
            {**config, "steps": 6, "continue_from": str(checkpoint)},
            tmp_path / "less",
        )
    torch.distributed.destroy_process_group()
    averaged = {**longer, "continue_from": str(checkpoint), "average": {}}
    with pytest.raises(ContinueError, match=r"step-00000008.* tensors"):
        run_stage("pretrain", inputs, averaged, tmp_path / "average")
