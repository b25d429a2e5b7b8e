"""The model that a stage tunes: all of it, or adapters on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gristmill.dataprep.context import Context
from gristmill.mixtures.posttraining import Lora
from gristmill.train.adapters.frozen import check_rounding, round_frozen
from gristmill.train.adapters.lora import adapt, adapted_tensors
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape
from gristmill.train.models.weights import TensorOf
from gristmill.train.parallel.sharding import sharded_model
from gristmill.train.parallel.world import World


def tuned_model(
    shape: Shape, tensor_of: TensorOf, lora: Lora | None, seed: int, world: World, dtype: torch.dtype,
    context: Context, extend: Callable[[nn.Module], None] | None = None, build: Callable[[Shape], Llama] | None = None,
) -> nn.Module:
    """A model that exists already, sharded, with new adapters where they are asked for.

    Args:
        shape, tensor_of: the model.
        lora: its adapters, and how what they freeze is rounded; all is trained without.
        seed: of the adapters.
        world, dtype, context: where and how it computes.
        extend: changes it once more before it is sharded; layers that this puts on top of it begin at zero.
        build: see `sharded_model`.

    Raises:
        LoraError: there is no such layer, or frozen weights cannot be rounded as they are to be.
    """
    base = None if lora is None else lora.base
    if base is not None:
        check_rounding(base, context.compute.compile != "off")
    inside = adapted_tensors(tensor_of, lora, seed)
    added: set[str] = set()

    def change(model: nn.Module) -> None:
        if lora is not None:
            adapt(model, lora)
        before = {name for name, _ in model.named_parameters()}
        if extend is not None:
            extend(model)
        added.update(name for name, _ in model.named_parameters() if name not in before)

    model = sharded_model(shape, lambda name, size: torch.zeros(size) if name in added else inside(name, size), world,
                          dtype, context.compute, adapt=change, build=build)
    if base is not None:
        round_frozen(model, tensor_of, base, world.device)
    return model
