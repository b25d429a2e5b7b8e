"""LoRA adapters: outputs, trained parameters, and merging."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gristmill.mixtures.schema.posttraining import Lora
from gristmill.train.adapters.lora import (
    LoraError,
    LoraLinear,
    adapt,
    adapted_tensors,
    check_rounding,
    is_adapter,
    merged,
)
from gristmill.train.adapters.quantised import product, rounded
from gristmill.train.models.model_config import Shape
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import drawn, load_model
from tests.jsonl import write_jsonl
from tests.train.trained import assert_same_output, weights_of

KINDS = [
    Lora(rank=4, alpha=8),
    Lora(rank=4, alpha=8, rslora=True),
    Lora(rank=4, alpha=8, dora=True),
]


def adapted(shape: Shape, lora: Lora) -> Llama:
    model = Llama(shape)
    adapt(model, lora)
    tensor_of = adapted_tensors(drawn(shape, 3), lora, seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensor_of(name, parameter.shape))
    return model


def test_layer_adds_its_scaled_product() -> None:
    """W = [[1, 2]], A = [[1, 1], [0, 1]], B = [[1, 2]], x = (3, 4): 11 + alpha / 2 (1 *
    7 + 2 * 4) = 11 + 7.5 alpha.
    """
    for lora, scale in (
        (Lora(rank=2, alpha=4), 2.0),
        (Lora(rank=2, alpha=4, rslora=True), 4 / 2**0.5),
    ):
        layer = LoraLinear(torch.nn.Linear(2, 1, bias=False), lora)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
            layer.lora_A.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
            layer.lora_B.weight.copy_(torch.tensor([[1.0, 2.0]]))
        assert layer(torch.tensor([3.0, 4.0])).item() == pytest.approx(11 + scale * 15)


@pytest.mark.parametrize("lora", KINDS)
def test_new_adapters_change_nothing_and_merging_keeps_outputs(
    lora: Lora, tiny_shape: Shape
) -> None:
    model, plain = adapted(tiny_shape, lora), Llama(tiny_shape)
    tensor_of = drawn(tiny_shape, 3)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(tensor_of(name, parameter.shape))
    ids = torch.randint(
        0, tiny_shape.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(model(ids), plain(ids), atol=1e-6, rtol=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    changed = model(ids)
    assert (changed - plain(ids)).abs().max() > 1e-3
    plain.load_state_dict(merged(dict(model.named_parameters()), lora))
    torch.testing.assert_close(plain(ids), changed, atol=1e-5, rtol=0)


def test_only_adapters_of_target_layers_are_trained(tiny_shape: Shape) -> None:
    model = adapted(tiny_shape, Lora(rank=2, targets=("q_proj", "v_proj")))
    trained = {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert trained == {
        f"model.layers.{layer}.self_attn.{target}.lora_{part}.weight"
        for layer in range(2)
        for target in ("q_proj", "v_proj")
        for part in "AB"
    }


def test_missing_target_layer_is_named(tiny_shape: Shape) -> None:
    model = Llama(tiny_shape)
    del model.model.layers[0].mlp, model.model.layers[1].mlp
    with pytest.raises(LoraError, match="up_proj"):
        adapt(model, Lora(targets=("q_proj", "up_proj")))


TRAINING = {
    "global_batch_size": 4,
    "micro_batch_size": 4,
    "seed": 11,
    "log_every": 1,
    "sequence_length": 64,
    "schedule": {"warmup_steps": 1},
}


@pytest.fixture
def start(
    run_stage: Callable[..., Any],
    tokenizer_folder: Path,
    mix_folder: Path,
    pretrain_config: dict[str, Any],
    tmp_path: Path,
) -> dict[str, Path]:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage(
        "pretrain", inputs, {**pretrain_config, "steps": 2}, tmp_path / "pretrain"
    )
    return {**inputs, "pretrain": tmp_path / "pretrain" / "data"}


@pytest.mark.slow
def test_sft_and_dpo_train_resume_and_merge_adapters(
    run_stage: Callable[..., Any], start: dict[str, Path], tmp_path: Path
) -> None:
    words = ("json", "text", "file", "name", "list", "code")
    write_jsonl(
        tmp_path / "sft.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": word},
                    {"role": "assistant", "content": f"A {word}."},
                ]
            }
            for word in words
        ],
    )
    config = {
        **TRAINING,
        "steps": 8,
        "data": [{"path": str(tmp_path / "sft.jsonl")}],
        "optimizer": {"learning_rate": 0.02},
        "lora": {"rank": 4, "dora": True},
        "average": {"kind": "swa"},
        "schedule": {"kind": "constant", "warmup_steps": 1},
    }
    run_stage("sft", start, {**config, "steps": 4}, tmp_path / "resumed")
    for folder in ("whole", "resumed"):
        summary = run_stage("sft", start, config, tmp_path / folder)
    assert_same_output(tmp_path / "resumed", tmp_path / "whole")
    before, after = (
        load_model(start["pretrain"] / "model"),
        load_model(tmp_path / "whole" / "data" / "model"),
    )
    changed = {
        name
        for name, parameter in after.named_parameters()
        if not torch.equal(parameter, before.get_parameter(name))
    }
    assert changed == {name for name, _ in after.named_parameters() if "_proj" in name}
    assert summary["last_loss"] < summary["first_loss"]
    adapters = load_file(
        tmp_path / "whole" / "data" / "adapter" / "adapter_model.safetensors"
    )
    assert len(adapters) == 2 * 7 * 3
    mean = load_file(
        tmp_path / "whole" / "data" / "adapter-average" / "adapter_model.safetensors"
    )
    assert mean.keys() == adapters.keys()
    assert not any(torch.equal(mean[name], adapters[name]) for name in adapters)
    assert load_model(tmp_path / "whole" / "data" / "model-average").shape == replace(
        before.shape, sequence_length=64
    )
    assert all(is_adapter(name) for name in adapters)

    write_jsonl(
        tmp_path / "dpo.jsonl",
        [
            {
                "prompt": [{"role": "user", "content": f"{word} {n}"}],
                "chosen": [{"role": "assistant", "content": "yes"}],
                "rejected": [{"role": "assistant", "content": "no"}],
            }
            for word in words
            for n in range(2)
        ],
    )
    pairs = {
        "data": [{"path": str(tmp_path / "dpo.jsonl")}],
        "sequence_length": 64,
        "micro_batch_size": 4,
    }
    inputs = {**start, "sft": tmp_path / "whole" / "data"}
    run_stage("reference", inputs, pairs, tmp_path / "reference")
    inputs["reference"] = tmp_path / "reference" / "data"
    dpo_summary = run_stage(
        "dpo",
        inputs,
        {
            **TRAINING,
            **pairs,
            "steps": 6,
            "optimizer": {"learning_rate": 0.02},
            "lora": {"rank": 2},
        },
        tmp_path / "dpo",
    )
    # With B = 0 the policy equals the reference, the model without adapters.
    assert dpo_summary["step_0"]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert dpo_summary["last_loss"] < dpo_summary["first_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bytes_per_weight", "error"), [("int8", 1.02, 0.01), ("nf4", 0.53, 0.1)]
)
def test_quantised_matrix_is_small_accurate_and_multiplied_as_restored(
    kind: Any, bytes_per_weight: float, error: float
) -> None:
    """Gradients reach the input. The error is a mean, relative to the mean magnitude of
    a weight.
    """
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(192, 256, generator=generator)
    small = rounded(weight, kind)
    restored = small.whole(torch.float32)
    assert restored.shape == weight.shape
    assert (restored - weight).abs().mean() < error * weight.abs().mean()
    # tables of 16 and 256
    assert small.nbytes < bytes_per_weight * weight.numel() + (
        1200 if kind == "nf4" else 0
    )
    x, gradient = (
        torch.randn(3, 5, width, generator=generator) for width in (256, 192)
    )
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = product(ours, small)
    expected = torch.nn.functional.linear(theirs, restored)
    assert torch.equal(out, expected)
    out.backward(gradient)
    expected.backward(gradient)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("kind", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_adapters_on_a_quantised_model_train_alike_and_merge_into_it(
    kind: str, run_stage: Callable[..., Any], start: dict[str, Path], tmp_path: Path
) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    words = ("json", "text", "file", "name", "list", "code")
    write_jsonl(
        tmp_path / "sft.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": word},
                    {"role": "assistant", "content": f"A {word}."},
                ]
            }
            for word in words
        ],
    )
    lora = {"rank": 4, "alpha": 8}
    config = {
        **TRAINING,
        "steps": 8,
        "data": [{"path": str(tmp_path / "sft.jsonl")}],
        "optimizer": {"learning_rate": 0.02},
        "lora": lora,
        "schedule": {"kind": "constant", "warmup_steps": 1},
    }
    plain = run_stage("sft", start, config, tmp_path / "plain")
    config = {**config, "lora": {**lora, "base": kind}}
    # the next run resumes from there
    run_stage("sft", start, {**config, "steps": 4}, tmp_path / "rounded")
    summary = run_stage("sft", start, config, tmp_path / "rounded")
    uninterrupted = run_stage("sft", start, config, tmp_path / "at once")
    assert summary["first_loss"] == pytest.approx(plain["first_loss"], rel=0.01)
    assert summary["last_loss"] == pytest.approx(plain["last_loss"], rel=0.05)
    assert summary["last_loss"] < summary["first_loss"]
    base = summary["lora_base"]
    assert base == {**uninterrupted["lora_base"], "kind": kind}
    # 2 layers of two (32, 32), two (16, 32) and three (48, 32) matrices; tables add
    # much to matrices so small
    assert base["float32_bytes"] == 4 * 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    assert base["bytes"] < base["float32_bytes"] * (0.3 if kind == "int8" else 0.45)
    assert_same_output(tmp_path / "rounded", tmp_path / "at once")
    after = weights_of(tmp_path / "rounded")
    before = load_file(start["pretrain"] / "model" / "model.safetensors")
    folder = tmp_path / "rounded" / "data" / "adapter"
    base_name = json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    assert base_name == f"{tmp_path.name}/pretrain/data/model"
    assert base_name in (folder / "README.md").read_text()
    assert {"nf4": "load_in_4bit=True", "int8": "in 8 bits"}[kind] in (
        folder / "README.md"
    ).read_text()
    adapters = load_file(folder / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    down, up = (
        adapters[f"base_model.model.{name}.{part}.weight"]
        for part in ("lora_A", "lora_B")
    )
    restored = rounded(before[f"{name}.weight"], kind).whole(torch.float32)  # type: ignore[arg-type]
    torch.testing.assert_close(after[f"{name}.weight"], restored + 8 / 4 * up @ down)
    assert torch.equal(
        after["model.embed_tokens.weight"],
        before["model.embed_tokens.weight"],
    )
    sizes = [
        sum(
            path.stat().st_size
            for path in (
                tmp_path / run / "work" / "checkpoints" / "step-00000004"
            ).iterdir()
        )
        for run in ("at once", "plain")
    ]
    assert sizes[1] - sizes[0] > 0.9 * base["float32_bytes"]


def test_unavailable_quantisation_is_rejected_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"lora\.dora"):
        Lora(base="int8", dora=True)
    with pytest.raises(LoraError, match=r"compile: off.* lora\.base"):
        check_rounding("int8", compiled=True)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(
        LoraError, match=r"pip install 'gristmill\[quant\]'.* base: int8"
    ):
        check_rounding("nf4", compiled=False)
