"""The model that a fine-tuning stage trains: all of it, or adapters on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from gristmill.dataprep.context import Context
from gristmill.mixtures.adapters import base_of
from gristmill.mixtures.posttraining import Dpo, Tuning
from gristmill.mixtures.reinforcement import Rl
from gristmill.train.adapters.frozen import check_rounding, round_frozen
from gristmill.train.adapters.lora import adapt, adapted_tensors
from gristmill.train.models.shape import Shape
from gristmill.train.models.weights import stored
from gristmill.train.parallel.sharding import sharded_model
from gristmill.train.parallel.world import World


def tuned_model(
    shape: Shape, start: Path, section: Tuning | Dpo | Rl, world: World, dtype: torch.dtype, context: Context,
    extend: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """A saved model, sharded, with new adapters where the section asks for them.

    Args:
        shape, start: the saved model.
        section: its `lora` and `seed`.
        world, dtype, context: where and how it computes.
        extend: puts a layer on top of it, before it is sharded; what that adds begins at zero.

    Raises:
        LoraError: there is no such layer, or frozen weights cannot be rounded as they are to be.
    """
    lora = section.lora
    base = base_of(lora)
    if base is not None:
        check_rounding(base, context.compute.compile != "off")
    inside = adapted_tensors(stored(start), lora, section.seed or 0)
    added: set[str] = set()

    def change(model: nn.Module) -> None:
        if lora is not None:
            adapt(model, lora)
        before = {name for name, _ in model.named_parameters()}
        if extend is not None:
            extend(model)
        added.update(name for name, _ in model.named_parameters() if name not in before)

    model = sharded_model(shape, lambda name, size: torch.zeros(size) if name in added else inside(name, size), world,
                          dtype, context.compute, adapt=change)
    if base is not None:
        round_frozen(model, stored(start), base, world.device)
    return model
