"""Matrices as integers of 8 bits with one scale per output row, in the files that transformers reads through torchao.

Only weights are rounded (symmetric, to nearest); activations and everything that is no matrix of a layer stay as they
are. The names and the metadata are those that transformers 5 writes for torchao's Int8WeightOnlyConfig.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gristmill.train.models.tensor_files import FRAMEWORK, Planned

LARGEST = 127
MATRIX = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|gate_up|down))_proj\.weight")
"""What is rounded: embeddings, the output matrix and experts are not."""
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "torchao",
    "include_input_output_embeddings": False,
    "modules_to_not_convert": None,
    "untie_embedding_weights": False,
    "quant_type": {
        "default": {
            "_type": "Int8WeightOnlyConfig",
            "_version": 2,
            "_data": {
                "group_size": None,
                "set_inductor_config": True,
                "granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}},
            },
        }
    },
}
"""The entry `quantization_config` of config.json."""


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (rows, columns) as int8 of the same shape, and the scales (rows, 1) float32; all zeros have scale 1."""
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (weight.float() / scales).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """The matrix that integers and scales stand for, float32."""
    return values.float() * scales.float()


def in_int8(tensors: Mapping[str, Planned], dtype: str) -> tuple[list[dict[str, Planned]], dict[str, str]]:
    """An export's tensors with its layers' matrices rounded, and the metadata of the files that hold them.

    Args:
        tensors: under Hugging Face's names.
        dtype: of the export, which matrices have again when they are multiplied.

    Returns:
        what each tensor is stored as, the parts of a matrix together.
    """
    found: list[dict[str, Planned]] = []
    metadata = {**FRAMEWORK, "tensor_names": json.dumps(list(tensors))}
    for name, tensor in tensors.items():
        if not MATRIX.fullmatch(name):
            found.append({name: tensor})
            metadata[name] = json.dumps({"_type": "Tensor"})
            continue
        column = (tensor.shape[0], 1)
        parts = {
            "qdata": Planned(torch.int8, tensor.shape, partial(_values, tensor)),
            "scale": Planned(tensor.dtype, column, partial(_scales, tensor)),
            "zero_point": Planned(torch.int8, column, partial(torch.zeros, column, dtype=torch.int8)),
        }
        found.append({stored_name(name, part): planned for part, planned in parts.items()})
        metadata[name] = json.dumps(
            {
                "_type": "Int8Tensor",
                "_tensor_data_names": ["zero_point", "qdata", "scale"],
                "_data": {
                    "act_quant_kwargs": None,
                    "reduce_range": False,
                    "block_size": [1, tensor.shape[1]],
                    "dtype": {"_type": "torch.dtype", "_data": dtype},
                },
            }
        )
    return found, metadata


def _values(weight: Planned) -> Tensor:
    return quantised(weight.make())[0]


def _scales(weight: Planned) -> Tensor:
    return quantised(weight.make())[1].to(weight.dtype)


def stored_name(name: str, part: str) -> str:
    """What a part of a rounded matrix is called in a file."""
    module, _, last = name.rpartition(".")
    return f"{module}._{last}_{part}"


def read_int8(name: str, names: Mapping[str, Any] | set[str], read: Callable[[str], Tensor]) -> Tensor | None:
    """A rounded matrix of a file in float32; None if it has none of that name.

    Args:
        name: of the matrix.
        names: all in the file.
        read: gives one of them.
    """
    values, scale = stored_name(name, "qdata"), stored_name(name, "scale")
    if values not in names or scale not in names:
        return None
    return dequantised(read(values), read(scale))
