"""Frozen weights in 4 or 8 bits under trainable adapters (QLoRA, Dettmers et al. 2023).

A matrix is dequantised only while it is multiplied, in the forward pass and again in
the backward pass, without gradients of its own. Quantised matrices are not parameters
and not in checkpoints, since quantising the base model again gives the same bits.
Processes that share weights each hold a shard of the bytes (an eighth or a quarter of
float32) and gather a matrix for its product; scales are replicated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, assert_never

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gristmill.mixtures.schema.posttraining import RoundedBase
from gristmill.train.distributed.context_parallel import all_gather_single

LARGEST = 127
"""Largest value of a symmetric int8 matrix."""


@dataclass(frozen=True)
class SharedBytes:
    """Tensor of bytes that is sharded over processes.

    Attributes:
        own: shard of this process, flat; the last ones may be padded.
        like: shape and dtype of the tensor, on the meta device.
        group: the processes, in the order of their shards.
    """

    own: Tensor
    like: Tensor
    group: dist.ProcessGroup

    def whole(self) -> Tensor:
        """Gather the tensor; a collective."""
        gathered = self.own.new_empty(len(self.own) * self.group.size())
        all_gather_single(gathered, self.own, group=self.group)
        return gathered[: self.like.numel()].view(self.like.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of this process's shard."""
        return self.own.nbytes


def shared(tensor: Tensor, group: dist.ProcessGroup) -> SharedBytes:
    """Shard of a tensor that is replicated on the processes of a group."""
    size = -(-tensor.numel() // group.size())
    flat = F.pad(tensor.flatten(), (0, size * group.size() - tensor.numel()))
    return SharedBytes(
        flat[size * group.rank() :][:size].clone(), tensor.to("meta"), group
    )


def _all_of(tensor: Tensor | SharedBytes) -> Tensor:
    return tensor.whole() if isinstance(tensor, SharedBytes) else tensor


@dataclass(frozen=True)
class Int8Weight:
    """A matrix as int8 (out, in) with one float32 scale per row (out, 1), rounded to
    nearest; the scale of a zero row is 1.
    """

    values: Tensor | SharedBytes
    scales: Tensor

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Dequantise the matrix, (out, in); a collective if it is sharded."""
        return (_all_of(self.values).float() * self.scales).to(dtype)

    def among(self, group: dist.ProcessGroup) -> Int8Weight:
        """Shard its integers over the processes of a group."""
        return replace(self, values=shared(_all_of(self.values), group))

    @property
    def nbytes(self) -> int:
        """Bytes on this process."""
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class Nf4Weight:
    """Matrix in 4-bit normal floats with a scale per 64 values, scales in 8 bits: the
    layout of bitsandbytes.
    """

    codes: Tensor | SharedBytes
    state: Any

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Dequantise the matrix, (out, in); a collective if it is sharded."""
        from bitsandbytes.functional import dequantize_4bit

        matrix: Tensor = dequantize_4bit(_all_of(self.codes), self.state)
        return matrix.to(dtype)

    def among(self, group: dist.ProcessGroup) -> Nf4Weight:
        """Shard its codes over the processes of a group."""
        return replace(self, codes=shared(_all_of(self.codes), group))

    @property
    def nbytes(self) -> int:
        """Bytes on this process, including the table of 16 values and the scales of
        scales.
        """
        parts = [*vars(self.state).values(), *vars(self.state.state2).values()]
        return self.codes.nbytes + sum(
            part.nbytes for part in parts if isinstance(part, Tensor)
        )


RoundedWeight = Int8Weight | Nf4Weight


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
        (gradient,) = gradients
        return gradient @ ctx.weight.whole(gradient.dtype), None


def rounded(weight: Tensor, kind: RoundedBase) -> RoundedWeight:
    """Quantise a float32 matrix (out, in) to 4 or 8 bits, on its device."""
    match kind:
        case "int8":
            largest = weight.abs().amax(dim=1, keepdim=True)
            scales = torch.where(largest > 0, largest / LARGEST, 1.0)
            values = (weight / scales).round().clamp(-LARGEST, LARGEST)
            return Int8Weight(values.to(torch.int8), scales)
        case "nf4":
            from bitsandbytes.functional import quantize_4bit

            return Nf4Weight(
                *quantize_4bit(
                    weight, blocksize=64, quant_type="nf4", compress_statistics=True
                )
            )
    assert_never(kind)


def product(x: Tensor, weight: RoundedWeight) -> Tensor:
    """Multiply (..., in) by a quantised (out, in): (..., out)."""
    return _Product.apply(x, weight)  # type: ignore[no-untyped-call]
