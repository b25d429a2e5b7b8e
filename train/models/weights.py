"""The numbers that a model starts from: drawn by name, or read from a file; the same for every world size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gristmill.dataprep.files import atomic_write, read_json, write_json
from gristmill.train.models.shape import Shape, shape_from_json, shape_from_llama, shape_to_json

if TYPE_CHECKING:
    from gristmill.train.models.llama import Llama

INIT_STD = 0.02
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")
WEIGHTS_FILE, SHAPE_FILE = "model.safetensors", "config.json"
TensorOf = Callable[[str, torch.Size], Tensor]
"""(parameter name, its whole shape) -> its float32 value on the CPU."""


def initial_tensor(name: str, size: torch.Size, layers: int, seed: int) -> Tensor:
    """A parameter's first value: normal with deviation 0.02, ones for norms.

    What ends in a residual connection is smaller by sqrt(2 * layers) (GPT-2, Radford et al. 2019, section 2.3).
    The generator is keyed by the parameter's name, so the value depends on nothing else in the model.
    """
    if len(size) < 2:
        return torch.ones(size)
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    deviation = INIT_STD / math.sqrt(2 * layers) if name.endswith(RESIDUAL_OUTPUTS) else INIT_STD
    return torch.empty(size).normal_(0.0, deviation, generator=generator)


def drawn(shape: Shape, seed: int) -> TensorOf:
    """Where the tensors of a new model come from."""
    return lambda name, size: initial_tensor(name, size, shape.layers, seed)


def stored(folder: Path) -> TensorOf:
    """Where the tensors of a saved model come from."""
    from safetensors import safe_open

    file = safe_open(str(folder / WEIGHTS_FILE), framework="pt")

    def tensor_of(name: str, size: torch.Size) -> Tensor:
        tensor: Tensor = file.get_tensor(name)
        if tensor.shape != size:
            raise ValueError(f"{folder / WEIGHTS_FILE}: {name} is {tuple(tensor.shape)}, the model wants "
                             f"{tuple(size)}: weights and {SHAPE_FILE} do not belong together")
        return tensor.float()

    return tensor_of


def read_shape(folder: Path) -> Shape:
    """The sizes of a model that a training stage saved, or that was exported as Llama."""
    config = read_json(folder / SHAPE_FILE)
    return shape_from_llama(config) if "model_type" in config else shape_from_json(config)


def save_model(folder: Path, shape: Shape, tensors: dict[str, Tensor]) -> None:
    """Write a model: `config.json`, and `model.safetensors` with whole float32 tensors on the CPU."""
    from safetensors.torch import save

    write_json(folder / SHAPE_FILE, shape_to_json(shape))
    with atomic_write(folder / WEIGHTS_FILE) as sink:
        sink.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"}))


def load_model(folder: Path, device: str = "cpu") -> Llama:
    """A saved model in float32, ready for evaluation in one process."""
    from gristmill.train.models.llama import Llama

    shape = read_shape(folder)
    with torch.device("meta"):
        model = Llama(shape)
    tensor_of = stored(folder)
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        value = nn.Parameter(tensor_of(name, parameter.shape).to(device), requires_grad=False)
        setattr(owner, name.rpartition(".")[2], value)
    return model.eval()
