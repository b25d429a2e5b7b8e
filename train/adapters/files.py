"""Adapters as files that PEFT loads: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gristmill.dataprep.files import atomic_write, write_json
from gristmill.mixtures.adapters import Lora
from gristmill.train.adapters.lora import DOWN, is_adapter, merged

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before a model's own names."""


def save_adapter(folder: Path, lora: Lora, tensors: Mapping[str, Tensor]) -> None:
    """Write the adapters among a model's tensors: float32, under the names that PEFT 0.21 gives them."""
    from safetensors.torch import save

    adapters = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items() if is_adapter(name)}
    write_json(folder / CONFIG_FILE, adapter_config(lora, tensors))
    with atomic_write(folder / WEIGHTS_FILE) as sink:
        sink.write(save(adapters, metadata={"format": "pt"}))


def adapter_config(lora: Lora, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What PEFT is told; the base model is whichever the user loads."""
    layers = {name.removesuffix(f".{DOWN}").rpartition(".")[2] for name in tensors if name.endswith(DOWN)}
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": lora.rank,
            "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "use_dora": lora.dora, "lora_dropout": 0.0,
            "target_modules": sorted(layers), "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
            "init_lora_weights": True}


def settle_adapters(
    out: Path, tensors: Mapping[str, dict[str, Tensor]], lora: Lora | None
) -> dict[str, dict[str, Tensor]]:
    """Write every model's adapters beside it (`adapter/` beside `model/`), and merge them into its weights.

    Args:
        out: the stage's data folder.
        tensors: by the folder that a model goes to, its own tensors and those of its adapters.
        lora: what the adapters are; nothing is done without.

    Returns:
        tensors of models without adapters, by folder.
    """
    if lora is None:
        return dict(tensors)
    for name, weights in tensors.items():
        save_adapter(out / name.replace("model", "adapter", 1), lora, weights)
    return {name: merged(weights, lora) for name, weights in tensors.items()}
