"""The model that a fine-tuning stage trains: all of it, or adapters on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from gristmill.dataprep.context import Context
from gristmill.mixtures.posttraining import Dpo, Tuning
from gristmill.train.adapters.lora import LoraError, adapt, adapted_tensors
from gristmill.train.models.shape import Shape
from gristmill.train.models.weights import stored
from gristmill.train.parallel.sharding import sharded_model
from gristmill.train.parallel.world import World


def tuned_model(
    shape: Shape, start: Path, section: Tuning | Dpo, world: World, dtype: torch.dtype, context: Context
) -> nn.Module:
    """A saved model, sharded, with new adapters where the section asks for them.

    Raises:
        LoraError: adapters are asked for, but matrices are split among processes, or there is no such layer.
    """
    lora = section.lora
    if lora is not None and world.tensor_mesh is not None:
        raise LoraError("lora: adapters cannot be split along matrices; set engine.parallel.tensor to 1 (the adapted "
                        "model is small enough for engine.parallel.shard), or remove lora")
    return sharded_model(shape, adapted_tensors(stored(start), lora, section.seed or 0), world, dtype, context.compute,
                         adapt=None if lora is None else partial(adapt, lora=lora))
