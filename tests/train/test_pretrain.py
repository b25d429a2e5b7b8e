from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import PackedSetError
from gristmill.tokenize.shuffle import ReadOnceError
from gristmill.train.distributed import fsdp
from gristmill.train.loop.batch_plan import RowPlan, extend_digest
from gristmill.train.models.weights import (
    WeightsError,
    load_model,
    read_shape,
    save_model,
)
from gristmill.train.objectives import next_token
from gristmill.train.stages import pretrain
from gristmill.train.trainer import OtherRowsError
from tests.jsonl import read_metrics
from tests.packed_sets import write_packed_set
from tests.train.trained import assert_same_output, steps_of, weights_of

SIXES = RowPlan(((0, 0, 6),))


@pytest.mark.slow
def test_loss_falls_and_metrics_add_up(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    summary = run_stage("pretrain", inputs, pretrain_config, tmp_path)
    lines = read_metrics(tmp_path)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    # an untrained model predicts uniformly
    assert abs(steps[0]["loss"] - math.log(400)) < 0.1
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert steps[-1]["tokens"] == 12 * 6 * 32
    for line in steps:
        sources = line["sources"].values()
        assert sum(source["tokens"] for source in sources) == 6 * 31
        mean = sum(source["loss"] * source["tokens"] for source in sources) / (6 * 31)
        assert line["loss"] == pytest.approx(mean, rel=1e-12)
    validations = [line for line in lines if "validation" in line]
    assert [line["step"] for line in validations] == [6, 12]
    for measures in validations[-1]["validation"].values():
        assert measures["perplexity"] == pytest.approx(math.exp(measures["loss"]))
        assert measures["tokens"] == 4 * 31
    assert summary["steps"] == 12
    assert summary["skipped_steps"] == 0
    assert (tmp_path / "data" / "skipped_steps.jsonl").read_text() == ""


@pytest.mark.slow
def test_phased_set_is_trained_on_phase_by_phase_to_its_end(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Two steps of the first source only and one of both; reading ahead stops at the
    end of the set.
    """
    phased, packed = tmp_path / "staged", PackedSet(inputs["mix"])
    shutil.copytree(inputs["mix"], phased)
    first, *other_counts = packed.rows_per_source
    train = {
        **packed.manifest["train"],
        "stages": [[12, *(0 for _ in other_counts)], [first - 12, *other_counts]],
    }
    (phased / "packed.json").write_text(
        json.dumps({**packed.manifest, "format": 5, "train": train})
    )
    with pytest.raises(ReadOnceError, match=r"84 rows .* 80"):
        run_stage(
            "pretrain",
            {**inputs, "mix": phased},
            {**pretrain_config, "steps": 14},
            tmp_path / "far",
        )
    run_stage(
        "pretrain",
        {**inputs, "mix": phased},
        {**pretrain_config, "steps": 3},
        tmp_path / "near",
    )
    steps = steps_of(tmp_path / "near")
    assert [list(line["sources"]) for line in steps[:2]] == [packed.sources[:1]] * 2
    assert list(steps[2]["sources"]) == packed.sources


@pytest.mark.slow
def test_bits_per_byte_is_loss_per_byte_of_the_predicted_tokens(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage("pretrain", inputs, {**pretrain_config, "steps": 1}, tmp_path)
    (line, *_) = read_metrics(tmp_path)
    packed = PackedSet(inputs["mix"])
    rows = SIXES.rows(packed.order(11), 0)
    num_bytes = np.load(inputs["tokenizer"] / "token_bytes.npy")[
        packed.read(rows)[:, 1:]
    ].sum()
    assert line["bits_per_byte"] == pytest.approx(
        line["loss"] * 6 * 31 / math.log(2) / num_bytes
    )


@pytest.mark.slow
def test_micro_batches_do_not_change_the_weights(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = {**pretrain_config, "steps": 4}
    for size in (6, 4, 1):
        run_stage(
            "pretrain",
            inputs,
            {**config, "micro_batch_size": size},
            tmp_path / str(size),
        )
    whole_batches = weights_of(tmp_path / "6")
    for size in ("4", "1"):
        torch.testing.assert_close(
            weights_of(tmp_path / size), whole_batches, atol=2e-5, rtol=0
        )


@pytest.mark.slow
def test_single_process_in_bf16_has_float32_master_weights_and_bf16_layers(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.tensor import DTensor

    observed: list[tuple[type, torch.dtype, torch.dtype]] = []
    original = next_token.NextToken.loss

    def loss(self: Any, model: Any, *arguments: Any) -> Any:
        parameter = next(model.parameters())
        layer = model.model.layers[0].mlp.up_proj
        layer.register_forward_hook(
            lambda module, inputs, out: observed.append(
                (kind, parameter.dtype, out.dtype)
            )
        )
        kind = type(parameter)
        return original(self, model, *arguments)

    monkeypatch.setattr(next_token.NextToken, "loss", loss)
    run_stage(
        "pretrain",
        inputs,
        {**pretrain_config, "steps": 1, "precision": "bf16"},
        tmp_path,
    )
    assert observed[0] == (DTensor, torch.float32, torch.bfloat16)


def test_unsharded_model_of_several_processes_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match=r"weight .*torch.float32.* DTensor"):
        fsdp.assert_master_weights(torch.nn.Linear(2, 2))


def test_plain_model_of_another_dtype_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with pytest.raises(RuntimeError, match=r"weight .*torch.bfloat16.* float32"):
        fsdp.assert_master_weights(torch.nn.Linear(2, 2, dtype=torch.bfloat16))


def test_layers_that_compute_in_another_dtype_are_rejected() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    fsdp.assert_compute_dtype(model, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"torch.float32.* torch.bfloat16"):
        model(torch.zeros(1, 2))


@pytest.mark.slow
def test_master_weights_are_saved_in_full_precision(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage(
        "pretrain",
        inputs,
        {**pretrain_config, "steps": 1, "precision": "bf16"},
        tmp_path,
    )
    for name, tensor in weights_of(tmp_path).items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.bfloat16().float()), name


@pytest.mark.slow
def test_bad_step_changes_nothing_and_records_its_rows(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 3 of 3 has a loss of NaN, so that the weights equal those after two
    steps.
    """
    config = {**pretrain_config, "schedule": {"kind": "constant", "warmup_steps": 0}}
    run_stage("pretrain", inputs, {**config, "steps": 2}, tmp_path / "two")
    third = SIXES.rows(PackedSet(inputs["mix"]).order(11), 2)
    original, poison = (
        next_token.NextToken.loss,
        PackedSet(inputs["mix"]).read(third).tolist(),
    )

    def loss(self: Any, model: Any, batch: Any, *arguments: Any) -> Any:
        result = original(self, model, batch, *arguments)
        bad = (
            float("nan") if all(row in poison for row in batch.tokens.tolist()) else 1.0
        )
        return result._replace(loss=result.loss * bad, sums=result.sums * bad)

    monkeypatch.setattr(next_token.NextToken, "loss", loss)
    summary = run_stage("pretrain", inputs, {**config, "steps": 3}, tmp_path / "three")
    assert summary["skipped_steps"] == 1
    (line,) = map(
        json.loads,
        (tmp_path / "three" / "data" / "skipped_steps.jsonl").read_text().splitlines(),
    )
    assert line["step"] == 3
    assert line["loss"] is None
    assert line["rows"] == third.tolist()
    assert "loss" not in next(
        line for line in read_metrics(tmp_path / "three") if line["step"] == 3
    )
    assert_same_output(tmp_path / "two", tmp_path / "three")


@pytest.mark.slow
def test_experts_and_z_loss_do_not_depend_on_micro_batches(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    model = {
        **pretrain_config["model"],
        "moe": {"experts": 4},
        "document_mask": True,
        "qk_norm": True,
    }
    config = {
        **pretrain_config,
        "model": model,
        "z_loss": 1e-3,
        "steps": 4,
        "validate_every": 4,
    }
    for size in (6, 1):
        run_stage(
            "pretrain",
            inputs,
            {**config, "micro_batch_size": size},
            tmp_path / str(size),
        )
    whole_batches, micro_batches = (
        read_metrics(tmp_path / str(size)) for size in (6, 1)
    )
    for line, expected in zip(whole_batches, micro_batches, strict=True):
        assert line.get("loss") == pytest.approx(expected.get("loss"), abs=1e-4)
        if "loss" in line:
            assert (
                0
                <= line["experts"]["smallest_load"]
                <= 1
                <= line["experts"]["largest_load"]
                <= 2
            )
            assert line["experts"] == expected["experts"]


def test_validation_set_replaces_the_held_out_rows_and_changes_no_weight(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    packed = PackedSet(inputs["mix"])
    rows = packed.read(np.arange(3))
    tokenizer = packed.manifest["tokenizer"]
    write_packed_set(tmp_path / "set", rows, {"all": 3}, tokenizer, {"poems": rows})
    config = {**pretrain_config, "steps": 2, "validate_every": 2}
    own = run_stage("pretrain", inputs, config, tmp_path / "own")
    config["validation_set"] = str(tmp_path / "set")
    other = run_stage("pretrain", inputs, config, tmp_path / "other")
    assert set(own["validation"]) == {"prose", "code"}
    assert list(other["validation"]) == ["poems"]
    assert other["validation"]["poems"]["tokens"] == 3 * 31
    weights = [
        load_file(tmp_path / name / "data/model/model.safetensors")
        for name in ("own", "other")
    ]
    assert all(
        torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items()
    )

    shifted = {**tokenizer, "eos": tokenizer["eos"] + 1}
    write_packed_set(tmp_path / "shifted", rows, {"all": 3}, shifted, {"poems": rows})
    config["validation_set"] = str(tmp_path / "shifted")
    with pytest.raises(PackedSetError, match="tokenizer is not that of the mixture"):
        run_stage("pretrain", inputs, config, tmp_path / "refused")


@pytest.mark.slow
def test_training_starts_from_a_checkpoint_of_transformers(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The first validation, after a negligible update, equals the loss of transformers
    on the same rows.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    peer = (
        AutoModelForCausalLM.from_config(
            Qwen2Config(
                vocab_size=400,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                initializer_range=0.3,
            )
        )
        .float()
        .eval()
    )
    peer.save_pretrained(tmp_path / "peer")
    config = {
        **pretrain_config,
        "model": {"init_from": str(tmp_path / "peer")},
        "steps": 1,
        "optimizer": {"learning_rate": 1e-12},
    }
    summary = run_stage("pretrain", inputs, config, tmp_path)
    rows = torch.from_numpy(
        PackedSet(inputs["mix"]).validation("code").astype(np.int64)
    )
    with torch.no_grad():
        expected = float(peer(rows, labels=rows).loss)
    assert expected > 6.5  # worse than uniform, since initial weights are large
    assert summary["validation"]["code"]["loss"] == pytest.approx(expected, abs=1e-3)
    # The checkpoint has 64 positions, and rows have 32 tokens.
    assert (
        read_shape(tmp_path / "data" / "model").sequence_length
        == summary["context"]
        == 64
    )


def test_checkpoint_with_fewer_ids_than_the_tokenizer_is_rejected(
    inputs: dict[str, Path], tiny_shape: Any, make_model: Any, tmp_path: Path
) -> None:
    save_model(tmp_path, tiny_shape, dict(make_model(tiny_shape).named_parameters()))
    with pytest.raises(WeightsError, match=r"100 ids.* 400"):
        pretrain.starting_model(
            Pretrain.model_validate(
                {"steps": 1, "model": {"init_from": str(tmp_path)}}
            ),
            PackedSet(inputs["mix"]),
            0,
        )


@pytest.mark.slow
def test_checkpoint_of_other_rows_is_rejected(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage("pretrain", inputs, pretrain_config, tmp_path / "run")
    changed_mix = tmp_path / "mix"
    shutil.copytree(inputs["mix"], changed_mix)
    shard = PackedSet(inputs["mix"]).read(np.arange(80))
    shard[3, 5] += 1
    tokenizer = PackedSet(inputs["mix"]).manifest["tokenizer"]
    write_packed_set(changed_mix, shard, {"prose": 40, "code": 40}, tokenizer)
    before, after = (
        PackedSet(inputs["mix"]).fingerprint,
        PackedSet(changed_mix).fingerprint,
    )
    with pytest.raises(OtherRowsError, match=f"{before}.*{after}"):
        run_stage(
            "pretrain",
            {**inputs, "mix": changed_mix},
            pretrain_config,
            tmp_path / "run",
        )


@pytest.mark.slow
def test_ramps_read_the_same_rows_and_resume_midway(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Batches of 2, 2, 3, 3 and then 6 rows; the first 5 steps have rows of 16 tokens,
    later ones of 32.
    """
    ramps = {
        **pretrain_config,
        "steps": 6,
        "batch_ramp": [
            {"until_step": 2, "global_batch_size": 2},
            {"until_step": 4, "global_batch_size": 3},
        ],
        "length_ramp": [{"until_step": 5, "sequence_length": 16}],
    }
    run_stage("pretrain", inputs, ramps, tmp_path / "whole", checkpoint_every=3)
    lines = steps_of(tmp_path / "whole")
    assert [line["tokens"] // 32 for line in lines] == [2, 4, 7, 10, 16, 22]
    trained = [
        sum(part["tokens"] for part in line["sources"].values()) for line in lines
    ]
    assert trained == [2 * 30, 2 * 30, 3 * 30, 3 * 30, 6 * 30, 6 * 31]
    assert all(
        line["data_wait_seconds"] >= 0 and 0 <= line["data_wait_share"] <= 1
        for line in lines[1:]
    )
    order, digest = (
        PackedSet(inputs["mix"]).order(11),
        PackedSet(inputs["mix"]).fingerprint,
    )
    for first, last, line in zip(
        (0, 2, 4, 7, 10, 16), (2, 4, 7, 10, 16, 22), lines, strict=True
    ):
        digest = extend_digest(digest, order.rows(np.arange(first, last)))
        assert line["rows_digest"] == digest
    # The checkpoint of step 3 is within both ramps.
    (tmp_path / "again" / "work").mkdir(parents=True)
    shutil.copytree(
        tmp_path / "whole" / "work" / "checkpoints" / "step-00000003",
        tmp_path / "again" / "work" / "checkpoints" / "step-00000003",
    )
    run_stage("pretrain", inputs, ramps, tmp_path / "again")
    assert_same_output(tmp_path / "again", tmp_path / "whole")


@pytest.mark.slow
def test_tasks_during_training_agree_with_the_saved_model(
    run_stage: Any,
    inputs: dict[str, Path],
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    from gristmill.mixtures.schema.evaluation import Task
    from gristmill.train.eval.tasks import open_tasks
    from gristmill.train.generation.language_model import with_tokenizer

    texts = tmp_path / "texts.txt"
    texts.write_text(
        "Return the text of a module.\nA line that is longer than the thirty-two "
        "tokens of a row, twice "
        "over: a line that is longer than the thirty-two tokens of a row.\n"
    )
    task = {"name": "texts", "path": str(texts), "kind": "rolling", "prompt": "text"}
    run_stage(
        "pretrain",
        inputs,
        {**pretrain_config, "tasks": [task], "evaluate_every": 4},
        tmp_path,
    )
    lines = {
        line["step"]: line["tasks"]["texts"]
        for line in read_metrics(tmp_path)
        if "tasks" in line
    }
    assert list(lines) == [4, 8, 12]
    assert lines[12]["bits_per_byte"] < lines[4]["bits_per_byte"]
    language = with_tokenizer(
        load_model(tmp_path / "data" / "model"), inputs["tokenizer"]
    )
    (opened,) = open_tasks([Task.model_validate(task)])
    metrics = opened.results(language, 0, 10)["texts"].metrics
    values = {name: estimate["value"] for name, estimate in metrics.items()}
    assert lines[12] == pytest.approx(values, rel=1e-6)
