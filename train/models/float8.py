"""Matrix products in 8-bit floating point with torchao."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from gristmill.train.models.transformer import Llama

MULTIPLE = 16
"""Required divisor of both dimensions of a matrix (torch._scaled_mm)."""
LEAST_WIDTH = 128
"""Minimum dimension: for smaller matrices scaling costs more than float8 gains
(nanochat, fp8.py).
"""


class Float8Error(RuntimeError):
    """8-bit products are not available."""


def use_float8(
    model: Llama, recipe: Literal["tensorwise", "rowwise"], device: torch.device
) -> None:
    """Convert the linear layers of all blocks to float8 products, forward and backward;
    master weights do not change.

    The output layer, the router and experts keep the compute dtype. On a CPU the
    products are emulated: same rounding, but slow. Call it before matrices are split
    and the model is sharded; names do not change.

    Raises:
        Float8Error: torchao is not installed, or the GPU has no float8 products.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError as error:
        raise Float8Error(
            f"pretrain.float8 is {recipe}, but torchao is not installed; install it "
            "with: pip install 'gristmill[quant]', or say float8: off"
        ) from error
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise Float8Error(
            f"pretrain.float8 is {recipe}, but {torch.cuda.get_device_name(device)} "
            "has no float8 "
            "products (compute capability 8.9 or higher has); say float8: off"
        )
    config = replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=device.type == "cpu"
    )
    convert_to_float8_training(model, config=config, module_filter_fn=is_worth_it)


def is_worth_it(module: nn.Module, name: str) -> bool:
    """Return True for linear layers of blocks, but routers of experts, whose dimensions
    suit the kernels.
    """
    if not isinstance(module, nn.Linear) or ".layers." not in f".{name}":
        return False
    if name.endswith(".gate"):
        return False
    sizes = (module.in_features, module.out_features)
    return min(sizes) >= LEAST_WIDTH and not any(size % MULTIPLE for size in sizes)
