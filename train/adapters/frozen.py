"""A model whose adapted layers hold their frozen weights rounded: filling it, reading it, what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.mixtures.posttraining import Lora, RoundedBase
from gristmill.train.adapters.lora import LoraError, LoraLinear
from gristmill.train.adapters.rounded import RoundedWeight, rounded
from gristmill.train.models.weights import TensorOf


def check_rounding(kind: RoundedBase, compiled: bool) -> None:
    """Refuse what cannot be had.

    Raises:
        LoraError: bitsandbytes, which rounds to 4 bits, is not installed, or the model is to be compiled.
    """
    if compiled:
        raise LoraError(f"lora.base is {kind}, but engine.compute.compile takes no rounded matrices; say compile: "
                        "off, or remove lora.base")
    if kind == "nf4":
        try:
            import bitsandbytes  # noqa: F401
        except ModuleNotFoundError as error:
            raise LoraError("lora.base is nf4, but bitsandbytes is not installed; install gristmill[quant], or say "
                            "base: int8, which needs nothing") from error


def round_frozen(model: nn.Module, tensor_of: TensorOf, kind: RoundedBase, device: torch.device) -> None:
    """Give all adapted layers of a model, which have no weight yet, their rounded ones; matrix by matrix."""
    for name, layer in _adapted_layers(model):
        whole = tensor_of(f"{name}.weight", torch.Size((layer.out_features, layer.in_features))).to(device)
        layer.rounded = rounded(whole, kind)


def rounded_weights(model: nn.Module) -> dict[str, RoundedWeight]:
    """The matrices that are held rounded, by the names of their layers' weights."""
    return {f"{name}.weight": layer.rounded for name, layer in _adapted_layers(model) if layer.rounded is not None}


def rounded_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What they stand for; float32 on the CPU."""
    return {name: weight.whole(torch.float32).cpu() for name, weight in rounded_weights(model).items()}


def describe_rounding(model: nn.Module, lora: Lora | None) -> dict[str, Any]:
    """For a summary: bytes that rounded matrices take on each process, and would in float32; nothing if none is."""
    if lora is None or lora.base is None:
        return {}
    taken = [(layer.rounded.nbytes, 4 * layer.in_features * layer.out_features)
             for _, layer in _adapted_layers(model) if layer.rounded is not None]
    return {"lora_base": {"kind": lora.base, "bytes": sum(ours for ours, _ in taken),
                          "float32_bytes": sum(whole for _, whole in taken)}}


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module
