"""Frozen weights in 4 or 8 bits under trainable adapters (QLoRA, Dettmers et al. 2023).

A matrix is dequantised only while it is multiplied, in the forward pass and again in
the backward pass, without gradients of its own. Quantised matrices are not parameters
and not in checkpoints, since quantising the base model again gives the same bits.
Processes that share weights each hold a shard of the bytes (an eighth or a quarter of
float32) and gather a matrix for its product; scales are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gristmill.mixtures.schema.posttraining import RoundedBase
from gristmill.train.distributed.context_parallel import all_gather_single

LARGEST = 127
"""Largest value of a symmetric int8 matrix."""


@dataclass(frozen=True)
class RoundedWeight:
    """Frozen matrix (out, in) in 4 or 8 bits.

    Attributes:
        data: integers or codes; if sharded, the part of this process, flat and padded.
        constants: scales and tables, replicated.
        dequantise: function from all data to the matrix.
        size, group: if sharded, shape of all data, and the processes in the order of
            their parts.
    """

    data: Tensor
    constants: Sequence[Tensor]
    dequantise: Callable[[Tensor], Tensor]
    size: tuple[int, ...] = ()
    group: dist.ProcessGroup | None = None

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Dequantise the matrix; a collective if it is sharded."""
        data = self.data
        if self.group is not None:
            gathered = data.new_empty(len(data) * self.group.size())
            all_gather_single(gathered, data, group=self.group)
            data = gathered[: math.prod(self.size)].view(self.size)
        return self.dequantise(data).to(dtype)

    def among(self, group: dist.ProcessGroup) -> RoundedWeight:
        """Shard the data over the processes of a group."""
        count = self.data.numel()
        part = -(-count // group.size())
        flat = F.pad(self.data.flatten(), (0, part * group.size() - count))
        shard = flat[part * group.rank() :][:part].clone()
        return replace(self, data=shard, size=self.data.shape, group=group)

    @property
    def nbytes(self) -> int:
        """Bytes on this process."""
        return sum(part.nbytes for part in (self.data, *self.constants))


class _Product(torch.autograd.Function):
    """x W^T with a quantised W, which stays quantised between forward and backward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: RoundedWeight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.whole(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.weight.whole(gradients[0].dtype), None


def rounded(weight: Tensor, kind: RoundedBase) -> RoundedWeight:
    """Quantise a float32 matrix (out, in) on its device.

    `int8` rounds to nearest, with one float32 scale per row (1 for a zero row). `nf4`
    has 4-bit normal floats with a scale per 64 values, and scales in 8 bits: the layout
    of bitsandbytes.
    """
    if kind == "int8":
        largest = weight.abs().amax(dim=1, keepdim=True)
        scales = torch.where(largest > 0, largest / LARGEST, 1.0)
        values = (weight / scales).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        return RoundedWeight(values, [scales], lambda data: data.float() * scales)
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    parts = (*vars(state).values(), *vars(state.state2).values())
    return RoundedWeight(
        codes,
        [part for part in parts if isinstance(part, Tensor)],
        lambda data: dequantize_4bit(data, state),
    )


def product(x: Tensor, weight: RoundedWeight) -> Tensor:
    """Multiply (..., in) by a quantised (out, in): (..., out)."""
    return _Product.apply(x, weight)  # type: ignore[no-untyped-call]
