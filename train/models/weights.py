"""The numbers that a model starts from: drawn by name, or read from a file; the same for every world size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gristmill.dataprep.files import atomic_write, read_json, write_json
from gristmill.mixtures.model import Initialisation
from gristmill.train.models.families import is_scorer, shape_from_hf, tensors_behind
from gristmill.train.models.initialisation import initial_tensor
from gristmill.train.models.int8 import read_int8, stored_name
from gristmill.train.models.shape import Shape, ShapeError, shape_from_json, shape_to_json

if TYPE_CHECKING:
    from gristmill.train.models.llama import Llama

WEIGHTS_FILE, SHAPE_FILE = "model.safetensors", "config.json"
INDEX_FILE = "model.safetensors.index.json"
TensorOf = Callable[[str, torch.Size], Tensor]
"""(parameter name, its whole shape) -> its float32 value on the CPU."""


class WeightsError(ValueError):
    """A folder's tensors are not those of the model that its config.json describes."""


def drawn(shape: Shape, seed: int, init: Initialisation = "gpt2") -> TensorOf:
    """Where the tensors of a new model come from."""
    return lambda name, size: initial_tensor(name, size, shape, init, seed)


def stored(folder: Path) -> TensorOf:
    """Where the tensors of a saved model come from: our own, or one that transformers wrote, in one file or several.

    Matrices in 8 bits (see int8) become float32.

    Raises:
        WeightsError: (when called) a tensor is missing or has another shape than the model wants.
    """
    config = read_json(folder / SHAPE_FILE)
    shape, family = read_shape(folder), config.get("model_type", "gristmill")
    find = _finder(folder)

    def tensor_of(name: str, size: torch.Size) -> Tensor:
        parts = [torch.cat([find(inner) for inner in names]) if len(names) > 1 else find(names[0])
                 for names in tensors_behind(name, shape, family)]
        tensor = torch.stack(parts) if len(parts) > 1 else parts[0].reshape(size) if len(size) == 3 else parts[0]
        if tensor.shape != size:
            raise WeightsError(f"{folder}: {name} is {tuple(tensor.shape)}, the model wants {tuple(size)}: weights and "
                               f"{SHAPE_FILE} do not belong together")
        return tensor.float()

    return tensor_of


def _finder(folder: Path) -> Callable[[str], Tensor]:
    """A function that reads a tensor from whichever safetensors file of a folder holds it."""
    from safetensors import safe_open

    index = folder / INDEX_FILE
    where: dict[str, str] | None = read_json(index)["weight_map"] if index.exists() else None

    @cache
    def opened(file: str) -> Any:
        if not (folder / file).exists():
            raise WeightsError(f"{folder} has no {file}; a model is {WEIGHTS_FILE}, or {INDEX_FILE} and its parts")
        return safe_open(str(folder / file), framework="pt")

    def find(name: str) -> Tensor:
        file = WEIGHTS_FILE if where is None else where.get(name) or where.get(stored_name(name, "qdata"))
        names = set() if file is None else set(opened(file).keys())
        if file is not None and (rounded := read_int8(name, names, opened(file).get_tensor)) is not None:
            return rounded
        if file is None or name not in names:
            raise WeightsError(f"{folder / (file or INDEX_FILE)} has no tensor {name}, which {SHAPE_FILE} asks for")
        tensor: Tensor = opened(file).get_tensor(name)
        return tensor

    return find


def read_shape(folder: Path) -> Shape:
    """The sizes of a model that a training stage saved, or that transformers can load.

    Raises:
        gristmill.train.models.families.UnknownArchitectureError: this decoder cannot run it.
        gristmill.train.models.shape.ShapeError: a model of ours, but of another version.
    """
    config = read_json(folder / SHAPE_FILE)
    if "model_type" in config:
        return shape_from_hf(config)
    try:
        return shape_from_json(config)
    except ShapeError as error:
        raise ShapeError(f"{folder}: {error}") from error


def save_model(folder: Path, shape: Shape, tensors: dict[str, Tensor]) -> None:
    """Write a model: `config.json`, and `model.safetensors` with whole float32 tensors on the CPU."""
    from safetensors.torch import save

    write_json(folder / SHAPE_FILE, shape_to_json(shape))
    with atomic_write(folder / WEIGHTS_FILE) as sink:
        sink.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"}))


def load_model(folder: Path, device: str = "cpu") -> Llama:
    """A saved model in float32, ready for evaluation in one process.

    Raises:
        WeightsError: the folder holds a model that scores text and does not write any.
    """
    from gristmill.train.models.llama import Llama

    if is_scorer(read_json(folder / SHAPE_FILE)):
        raise WeightsError(f"{folder} is a reward model, which scores texts and cannot write any; name a model that "
                           "`pretrain`, `sft` or `dpo` made")
    with torch.device("meta"):
        model = Llama(read_shape(folder))
    fill_from(model, stored(folder), device)
    return model


def fill_from(model: nn.Module, tensor_of: TensorOf, device: str, dtype: torch.dtype = torch.float32) -> None:
    """Give a model without values those that `tensor_of` knows, frozen, in evaluation mode."""
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        value = nn.Parameter(tensor_of(name, parameter.shape).to(device, dtype), requires_grad=False)
        setattr(owner, name.rpartition(".")[2], value)
    model.eval()
