"""Adapters in PEFT's file format: `adapter_config.json` and
`adapter_model.safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gristmill.core.files import write_bytes, write_json, write_text
from gristmill.mixtures.schema.posttraining import Lora
from gristmill.train.adapters.lora import DOWN, is_adapter, merged
from gristmill.train.models.tensor_files import Tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_PARTS = 4
"""Components of a model's path in a store: stage, slug and fingerprint, `data`,
`model`.
"""
HELD = {
    "nf4": 'in 4 bits (bitsandbytes: `load_in_4bit=True, bnb_4bit_quant_type="nf4"`)',
    "int8": "in 8 bits (to nearest, symmetric, one scale per row)",
}
PREFIX = "base_model.model."
"""Prefix of PEFT for a model's own names."""


def save_adapter(
    folder: Path, lora: Lora, tensors: Tensors, base: str | None = None
) -> None:
    """Write the adapters among a model's tensors as float32, with the names of PEFT
    0.21.

    Args:
        folder: destination.
        lora: their settings.
        tensors: of the model, including adapters.
        base: name of the base model.
    """
    from safetensors.torch import save

    adapters = {
        PREFIX + name: tensor.contiguous()
        for name, tensor in tensors.items()
        if is_adapter(name)
    }
    adapted = {name.removesuffix(f".{DOWN}") for name in tensors if name.endswith(DOWN)}
    layers = {module.rpartition(".")[2] for module in adapted}
    modules = {name.removesuffix(".weight") for name in tensors} - adapted
    # A part for images may have layers of the same names without adapters.
    is_shared = any(module.rpartition(".")[2] in layers for module in modules)
    # PEFT has no key for a quantised base, which the README describes.
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "lora_dropout": 0.0,
        "target_modules": sorted(adapted if is_shared else layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    write_json(folder / CONFIG_FILE, config)
    write_bytes(folder / WEIGHTS_FILE, save(adapters, metadata={"format": "pt"}))


def readme(lora: Lora, base: str) -> str:
    """README with the base model of the adapters and its quantisation."""
    format_text = HELD[lora.base] if lora.base is not None else "in float32"
    return (
        f"---\nlibrary_name: peft\n---\n\n# Adapters of rank {lora.rank}\n\nTrained "
        f"on `{base}`, a folder of the "
        f"gristmill store, whose adapted matrices were held {format_text}. Load that "
        "model, rounded the same way, as "
        "transformers has it, and put these on it:\n\n"
        '    peft.PeftModel.from_pretrained(model, "path/to/this/folder")\n'
    )


def settle_adapters(
    out: Path, tensors: Mapping[str, Tensors], lora: Lora | None, start: Path
) -> dict[str, Tensors]:
    """Write every model's adapters (`adapter/` beside `model/`), and merge them into
    its weights.

    Args:
        out: the stage's data folder.
        tensors: folder of each model -> its tensors, including adapters.
        lora: settings of the adapters; None does nothing.
        start: folder of the base model.

    Returns:
        tensors of models without adapters, by folder.
    """
    if lora is None:
        return dict(tensors)
    # The base model's path within the store does not depend on the store's location.
    base = "/".join(start.parts[-BASE_PARTS:])
    for name, weights in tensors.items():
        folder = out / name.replace("model", "adapter", 1)
        save_adapter(folder, lora, weights, base)
        write_text(folder / "README.md", readme(lora, base))
    return {name: merged(weights, lora) for name, weights in tensors.items()}
