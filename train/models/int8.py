"""Int8 matrices with one scale per output row, in the file format that transformers
reads through torchao.

Only weights are rounded (symmetric, to nearest); activations and tensors other than
layer matrices stay as they are. Names and metadata are those of transformers 5 for
torchao's Int8WeightOnlyConfig.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from gristmill.train.models.tensor_files import FRAMEWORK, Planned

LARGEST = 127
MATRIX = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|gate_up|down))_proj\.weight"
)
"""Quantised matrices; embeddings, the output matrix and experts are not."""
QUANTIZATION_CONFIG: Mapping[str, object] = {
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
"""Entry `quantization_config` of config.json."""


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix (rows, columns) to int8, with scales (rows, 1) float32; the
    scale of a zero row is 1.
    """
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (weight.float() / scales).round().clamp(-LARGEST, LARGEST).to(
        torch.int8
    ), scales


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """Dequantise int8 values with scales, float32."""
    return values.float() * scales.float()


def in_int8(
    tensors: Mapping[str, Planned], dtype: str
) -> tuple[list[dict[str, Planned]], dict[str, str]]:
    """Tensors of an export with quantised layer matrices, and the metadata of their
    files.

    Args:
        tensors: by Hugging Face name.
        dtype: of the export, to which matrices are dequantised for products.

    Returns:
        stored tensors, with the parts of a matrix grouped.
    """
    groups = []
    metadata = {**FRAMEWORK, "tensor_names": json.dumps(list(tensors))}
    for name, tensor in tensors.items():
        if not MATRIX.fullmatch(name):
            groups.append({name: tensor})
            metadata[name] = json.dumps({"_type": "Tensor"})
            continue
        column = (tensor.shape[0], 1)
        parts = {
            "qdata": Planned(torch.int8, tensor.shape, partial(_quantised, tensor, 0)),
            "scale": Planned(tensor.dtype, column, partial(_quantised, tensor, 1)),
            "zero_point": Planned(
                torch.int8, column, partial(torch.zeros, column, dtype=torch.int8)
            ),
        }
        groups.append(
            {stored_name(name, part): planned for part, planned in parts.items()}
        )
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
    return groups, metadata


def _quantised(weight: Planned, part: int) -> Tensor:
    """Values (part 0) of a matrix, or its scales (part 1) in the dtype of the export."""
    tensor = quantised(weight.make())[part]
    return tensor.to(weight.dtype) if part else tensor


def stored_name(name: str, part: str) -> str:
    """Name of a part of a quantised matrix in a file."""
    module, _, last = name.rpartition(".")
    return f"{module}._{last}_{part}"
