"""Compilation, activation checkpointing and float8 do not change the training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.mixtures.schema.engine import Compute, Engine
from gristmill.train.models.transformer import configure
from tests.train.trained import assert_same_output, weights_of


@pytest.fixture
def config(pretrain_config: dict[str, Any]) -> dict[str, Any]:
    return {
        **pretrain_config,
        "model": {**pretrain_config["model"], "document_mask": True},
        "steps": 3,
        "validate_every": 3,
    }


def losses(folder: Path) -> list[float]:
    lines = map(
        json.loads, (folder / "data" / "metrics.jsonl").read_text().splitlines()
    )
    return [
        line["loss"] if "loss" in line else line["validation"]["code"]["loss"]
        for line in lines
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "compute",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "checkpoint_every_block": 2},
        {"activation_checkpointing": "selective"},
    ],
)
def test_activation_checkpointing_changes_no_bit(
    compute: dict[str, Any],
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    run_stage("pretrain", inputs, config, tmp_path / "plain")
    run_stage(
        "pretrain", inputs, config, tmp_path / "again", compute=Compute(**compute)
    )
    assert losses(tmp_path / "again") == losses(tmp_path / "plain")
    assert_same_output(tmp_path / "again", tmp_path / "plain")


def test_checkpointing_reduces_memory_between_the_passes(
    tiny_shape: Any, make_model: Any
) -> None:
    """Counts the bytes of tensors that are alive between the forward and the backward
    pass.
    """

    def bytes_alive(**compute: Any) -> int:
        model = make_model(tiny_shape)
        configure(model, Compute(**compute))
        alive: dict[int, int] = {}

        class Counting(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                out = function(*args, **(kwargs or {}))
                for tensor in out if isinstance(out, tuple | list) else [out]:
                    if isinstance(tensor, torch.Tensor):
                        storage = tensor.untyped_storage()
                        alive[storage._cdata] = storage.nbytes()
                        weakref.finalize(storage, alive.pop, storage._cdata, None)
                return out

        import weakref

        with Counting():
            loss = model(torch.arange(24)[None].repeat(8, 1)).sum()
        num_bytes = sum(alive.values())
        loss.backward()
        return num_bytes

    off, every_second, selective, full = (
        bytes_alive(),
        bytes_alive(activation_checkpointing="full", checkpoint_every_block=2),
        bytes_alive(activation_checkpointing="selective"),
        bytes_alive(activation_checkpointing="full"),
    )
    assert full < selective < off
    assert full < every_second < off


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler"
)
def test_compiled_training_has_nearly_the_same_losses(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """One layer and equal micro-batches, since every further shape compiles again."""
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    config = {
        **config,
        "model": {**config["model"], "layers": 1},
        "steps": 2,
        "global_batch_size": 4,
    }
    run_stage("pretrain", inputs, config, tmp_path / "plain")
    for number, compute in enumerate(
        (
            {"compile": "block", "activation_checkpointing": "selective"},
            {"compile": "model"},
        )
    ):
        torch._dynamo.utils.counters.clear()
        run_stage(
            "pretrain",
            inputs,
            config,
            tmp_path / str(number),
            compute=Compute.model_validate(compute),
        )
        assert losses(tmp_path / str(number)) == pytest.approx(
            losses(tmp_path / "plain"), abs=2e-5
        )
        # compilation happened
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_float8_training_has_nearly_the_same_losses(
    run_stage: Any,
    tokenizer_folder: Path,
    mix_folder: Path,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emulates float8 on the CPU. Saved weights have their usual names and dtype."""
    float8 = pytest.importorskip("torchao.float8")
    converted = []
    monkeypatch.setattr(
        float8,
        "convert_to_float8_training",
        spy(float8.convert_to_float8_training, converted),
    )
    inputs = {"tokenizer": tokenizer_folder, "mix": mix_folder}
    config = {
        **config,
        "model": {"layers": 1, "width": 128, "heads": 4, "ffn_width": 128},
    }
    run_stage("pretrain", inputs, config, tmp_path / "plain")
    for recipe in ("tensorwise", "rowwise"):
        run_stage("pretrain", inputs, {**config, "float8": recipe}, tmp_path / recipe)
        float8_losses, expected = losses(tmp_path / recipe), losses(tmp_path / "plain")
        assert float8_losses != expected
        assert float8_losses == pytest.approx(expected, abs=0.05)
    layers = [
        name
        for name, module in converted[0].named_modules()
        if type(module).__name__ == "Float8Linear"
    ]
    assert len(layers) == 7
    assert all(".layers.0." in name for name in layers)
    plain, rowwise = weights_of(tmp_path / "plain"), weights_of(tmp_path / "rowwise")
    assert plain.keys() == rowwise.keys()


def spy(function: Any, results: list[Any]) -> Any:
    """Wrap a function to record its results."""

    def call(*args: Any, **kwargs: Any) -> Any:
        results.append(function(*args, **kwargs))
        return results[-1]

    return call


def test_invalid_compute_settings_are_rejected_with_the_fix() -> None:
    with pytest.raises(ValueError, match="compile: block"):
        Compute(activation_checkpointing="budget")
    with pytest.raises(ValueError, match=r"compile: model .*ranks is 2.* block"):
        Engine(ranks=2, compute=Compute(compile="model"))
