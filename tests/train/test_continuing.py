"""Training that goes on from another one's checkpoint, on a set from which rows were taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gristmill.core.files import read_json, sha256_file, write_json
from gristmill.tokenize.order import rows_before, unrank
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_writing import write_packed_set
from gristmill.train.loop import loop
from gristmill.train.loop.batch_plan import extend_digest
from gristmill.train.loop.resuming import ContinueError

SEED, BATCH, STEPS = 11, 6, 12


def without_row(mix: Path, target: Path, row: int) -> PackedSet:
    """A copy of a packed set in which one row is emptied and withheld."""
    shutil.copytree(mix, target)
    manifest = read_json(target / "packed.json")
    (shard,) = manifest["train"]["shards"]
    tokens = np.memmap(target / shard["file"], "<u2", "r+", shape=(80, 32))
    tokens[row] = 0
    tokens.flush()
    shard.update(withheld=[row], whole_sha256=shard["sha256"], sha256=sha256_file(target / shard["file"]))
    write_json(target / "packed.json", manifest)
    return PackedSet(target)


def lines_of(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "data" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def test_a_training_goes_on_from_the_last_clean_checkpoint_and_never_reads_what_was_taken(
    run_stage: Any, tokenizer_folder: Path, mix_folder: Path, pretrain_config: dict[str, Any], tmp_path: Path
) -> None:
    config = {**pretrain_config, "steps": STEPS, "seed": SEED, "global_batch_size": BATCH}
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage("pretrain", inputs, config, tmp_path / "first", checkpoint_every=4)
    checkpoints = tmp_path / "first" / "work" / "checkpoints"
    whole = PackedSet(mix_folder)
    taken = int(whole.order(SEED).rows(np.arange(5 * BATCH, 6 * BATCH))[2])  # step 6 reads it
    less = without_row(mix_folder, tmp_path / "less", taken)
    assert less.fingerprint == whole.fingerprint

    inputs["mix"] = less.folder
    clean = {**config, "continue_from": str(checkpoints / "step-00000004")}
    summary = run_stage("pretrain", inputs, clean, tmp_path / "second", checkpoint_every=4)
    before, after = lines_of(tmp_path / "first"), lines_of(tmp_path / "second")
    assert sorted(after) == list(range(5, STEPS + 1))
    assert after[5]["loss"] == before[5]["loss"]
    read, digest = less.order(SEED).rows(np.arange(STEPS * BATCH)).reshape(STEPS, BATCH), less.fingerprint
    for step in range(1, STEPS + 1):
        digest = extend_digest(digest, read[step - 1])
        if step in after:
            assert after[step]["rows_digest"] == digest
    assert summary["rows_digest"] == digest
    assert taken not in read
    uninterrupted = whole.order(SEED).rows(np.arange(STEPS * BATCH + 1)).tolist()
    assert read.ravel().tolist() == [row for row in uninterrupted if row != taken]

    tainted = {**config, "continue_from": str(checkpoints / "step-00000008")}
    with pytest.raises(ContinueError, match="step-00000008 has read other rows in its 8 steps than this training"):
        run_stage("pretrain", inputs, tainted, tmp_path / "third")
    torch.distributed.destroy_process_group()  # a stage that raises leaves its group to the end of its process
    (checkpoints / "step-00000004" / "complete.json").unlink()
    with pytest.raises(ContinueError, match="step-00000004 is not a complete checkpoint"):
        run_stage("pretrain", inputs, clean, tmp_path / "fourth")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "data" / "model" / "model.safetensors")


def test_a_stopped_training_resumes_with_smaller_micro_batches_and_other_measurements(
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
        patched.setattr(loop, "stop_requested", lambda: True)
        with pytest.raises(loop.StoppedError):
            run_stage("pretrain", inputs, config, tmp_path / "less")
    torch.distributed.destroy_process_group()
    others = {"micro_batch_size": 2, "validate_every": 5, "noise_scale_every": 2}
    run_stage("pretrain", inputs, {**config, **others}, tmp_path / "less")
    whole, less = lines_of(tmp_path / "whole"), lines_of(tmp_path / "less")
    assert sorted(less) == sorted(whole) == list(range(1, STEPS + 1))
    for step, line in less.items():
        assert line["rows_digest"] == whole[step]["rows_digest"]
        assert line["loss"] == pytest.approx(whole[step]["loss"], abs=1e-4)
    assert "gradient_noise" in less[STEPS]
    before, after = weights_of(tmp_path / "whole"), weights_of(tmp_path / "less")
    assert all(torch.allclose(before[name], after[name], atol=1e-4) for name in before)


def test_a_finished_training_is_made_longer_from_a_permanent_checkpoint_with_the_same_bits(
    run_stage: Any, tokenizer_folder: Path, mix_folder: Path, pretrain_config: dict[str, Any], tmp_path: Path
) -> None:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    config = {**pretrain_config, "schedule": {"kind": "wsd", "warmup_steps": 2, "decay_fraction": 0.25}}
    run_stage("pretrain", inputs, config, tmp_path / "short", permanent_every=8)
    assert read_json(tmp_path / "short" / "work" / "kept.json") == ["checkpoints/step-00000008"]
    longer = {**config, "steps": 20}
    run_stage("pretrain", inputs, longer, tmp_path / "whole")
    checkpoint = tmp_path / "short" / "work" / "checkpoints" / "step-00000008"
    run_stage("pretrain", inputs, {**longer, "continue_from": str(checkpoint)}, tmp_path / "longer")
    assert sorted(lines_of(tmp_path / "longer")) == list(range(9, 21))
    whole, continued = weights_of(tmp_path / "whole"), weights_of(tmp_path / "longer")
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    with pytest.raises(ContinueError, match="has done 8 steps already, of 6 that this training is to have"):
        run_stage("pretrain", inputs, {**config, "steps": 6, "continue_from": str(checkpoint)}, tmp_path / "less")
    torch.distributed.destroy_process_group()
    averaged = {**longer, "continue_from": str(checkpoint), "average": {}}
    with pytest.raises(ContinueError, match="holds other tensors than this training's"):
        run_stage("pretrain", inputs, averaged, tmp_path / "average")


def another_mixture(whole: PackedSet, positions: int, tokenizer: dict[str, Any], target: Path) -> PackedSet:
    """A set that begins with what a training has read of another one, and has more prose than code behind it."""
    order = whole.order(SEED)
    read, unread = order.rows(np.arange(positions)), order.rows(np.arange(positions, whole.rows))
    rest = (24, 8)
    own = [unread[whole.source_of(unread) == source][:count] for source, count in enumerate(rest)]
    merged, index = unrank(rest, np.arange(sum(rest)))
    behind = np.array([own[source][row] for source, row in zip(merged.tolist(), index.tolist(), strict=True)])
    kept = rows_before(whole.rows_per_source, positions)
    counts = {name: first + more for name, first, more in zip(whole.sources, kept, rest, strict=True)}
    write_packed_set(
        target,
        whole.read(np.concatenate([read, behind])),
        counts,
        tokenizer,
        {name: whole.validation(name) for name in whole.sources},
    )
    manifest = read_json(target / "packed.json")
    manifest["train"].update(stages=[kept, [*rest]], begun=whole.phases)
    write_json(
        target / "packed.json",
        {
            **manifest,
            "format": 6,
            "continues": {
                "rows": positions,
                "sources": whole.sources,
                "phases": whole.phases,
                "seed": SEED,
                "fingerprint": whole.fingerprint,
                "digest": "not looked at here",
            },
        },
    )
    return PackedSet(target)


def test_a_mixture_is_changed_on_the_way_with_the_bits_of_a_training_that_had_both_from_its_start(
    run_stage: Any, tokenizer_folder: Path, mix_folder: Path, pretrain_config: dict[str, Any], tmp_path: Path
) -> None:
    """Steps 1 to 4 read the first set. The checkpoint of step 3 is taken over: step 4 is trained again."""
    config = {**pretrain_config, "steps": 8, "schedule": {"kind": "constant", "warmup_steps": 0}}
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage("pretrain", inputs, config, tmp_path / "first", checkpoint_every=3, keep_checkpoints=9)
    checkpoints, whole = tmp_path / "first" / "work" / "checkpoints", PackedSet(mix_folder)
    inputs["mix"] = another_mixture(whole, 4 * BATCH, whole.manifest["tokenizer"], tmp_path / "mix").folder
    run_stage("pretrain", inputs, config, tmp_path / "both")
    taken = {**config, "continue_from": str(checkpoints / "step-00000003")}
    run_stage("pretrain", inputs, taken, tmp_path / "continued")
    first, both, continued = (lines_of(tmp_path / name) for name in ("first", "both", "continued"))
    assert sorted(continued) == [4, 5, 6, 7, 8]
    assert [both[step]["loss"] for step in range(1, 5)] == [first[step]["loss"] for step in range(1, 5)]
    assert both[5]["loss"] != first[5]["loss"]
    for step, line in continued.items():
        assert (line["loss"], line["rows_digest"]) == (both[step]["loss"], both[step]["rows_digest"])
    one, other = weights_of(tmp_path / "both"), weights_of(tmp_path / "continued")
    assert all(torch.equal(one[name], other[name]) for name in one)
    phases = [json.loads(line) for line in (tmp_path / "both" / "data" / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in phases if "phase" in line] == [
        {"step": 1, "phase": {"number": 1, "of": 2, "shares": {"prose": 0.5, "code": 0.5}}},
        {"step": 5, "phase": {"number": 2, "of": 2, "shares": {"prose": 0.75, "code": 0.25}}},
    ]
    late = {**config, "continue_from": str(checkpoints / "step-00000006")}
    with pytest.raises(ContinueError, match="has read 36 rows, but the set continues the one that it read behind 24"):
        run_stage("pretrain", inputs, late, tmp_path / "late")
    torch.distributed.destroy_process_group()
    other_seed = {**taken, "seed": SEED + 1}
    run_stage("pretrain", inputs, other_seed, tmp_path / "seed")  # what was read is settled, whatever the seed
    assert lines_of(tmp_path / "seed")[4]["loss"] == continued[4]["loss"]
