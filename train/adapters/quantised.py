"""Frozen weights in 4 or 8 bits under adapters that are trained (QLoRA, Dettmers et al. 2023).

A matrix has its values again only while it is multiplied, in the forward pass and once more in the backward pass, which
needs no gradient of it. Rounded matrices are not parameters, and no checkpoint holds them, since rounding what the
training starts from gives the same bits. Processes that share weights each hold a share of their bytes (of an eighth or
a quarter of what they are in float32), and gather those of a matrix while it is multiplied; scales are on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, assert_never

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gristmill.mixtures.posttraining import RoundedBase
from gristmill.train.models.int8 import dequantised, quantised
from gristmill.train.parallel.row_split import all_gather_single


@dataclass(frozen=True)
class SharedBytes:
    """A tensor of bytes of which each of some processes holds a share.

    Attributes:
        own: this process's, flat; the last processes' may be filled up.
        like: the tensor's shape and dtype, without its bytes.
        group: the processes, in the order of their shares.
    """

    own: Tensor
    like: Tensor
    group: dist.ProcessGroup

    def whole(self) -> Tensor:
        """All of it; the processes call this together."""
        gathered = self.own.new_empty(len(self.own) * self.group.size())
        all_gather_single(gathered, self.own, group=self.group)
        return gathered[: self.like.numel()].view(self.like.shape)

    @property
    def nbytes(self) -> int:
        """What this process's share takes."""
        return self.own.nbytes


def shared(tensor: Tensor, group: dist.ProcessGroup) -> SharedBytes:
    """This process's share of a tensor that all processes of a group have."""
    size = -(-tensor.numel() // group.size())
    flat = F.pad(tensor.flatten(), (0, size * group.size() - tensor.numel()))
    return SharedBytes(flat[size * group.rank() :][:size].clone(), tensor.to("meta"), group)


def _all_of(held: Tensor | SharedBytes) -> Tensor:
    return held.whole() if isinstance(held, SharedBytes) else held


@dataclass(frozen=True)
class Int8Weight:
    """A matrix as int8 (out, in) with one float32 scale per row (out, 1); see models.int8."""

    values: Tensor | SharedBytes
    scales: Tensor

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The matrix that is meant, (out, in); processes that share it call this together."""
        return dequantised(_all_of(self.values), self.scales).to(dtype)

    def among(self, group: dist.ProcessGroup) -> Int8Weight:
        """The same, its integers shared by the processes of a group."""
        return replace(self, values=shared(_all_of(self.values), group))

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class Nf4Weight:
    """A matrix in normal floats of 4 bits with a scale per 64 of them, scales in 8 bits: bitsandbytes' layout."""

    codes: Tensor | SharedBytes
    state: Any

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The matrix that is meant, (out, in); processes that share it call this together."""
        from bitsandbytes.functional import dequantize_4bit

        found: Tensor = dequantize_4bit(_all_of(self.codes), self.state)
        return found.to(dtype)

    def among(self, group: dist.ProcessGroup) -> Nf4Weight:
        """The same, its codes shared by the processes of a group."""
        return replace(self, codes=shared(_all_of(self.codes), group))

    @property
    def nbytes(self) -> int:
        """What it takes, the table of its 16 values and the scales' own scales included."""
        parts = [*vars(self.state).values(), *vars(self.state.state2).values()]
        return self.codes.nbytes + sum(part.nbytes for part in parts if isinstance(part, Tensor))


RoundedWeight = Int8Weight | Nf4Weight


class _Product(torch.autograd.Function):
    """x W^T of a rounded W, which is kept as it is for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: RoundedWeight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.whole(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.weight.whole(gradient.dtype), None


def rounded(weight: Tensor, kind: RoundedBase) -> RoundedWeight:
    """A float32 matrix (out, in) in 4 or 8 bits, on its device."""
    match kind:
        case "int8":
            return Int8Weight(*quantised(weight))
        case "nf4":
            from bitsandbytes.functional import quantize_4bit

            return Nf4Weight(*quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True))
    assert_never(kind)


def product(x: Tensor, weight: RoundedWeight) -> Tensor:
    """(..., in) times a rounded (out, in): (..., out)."""
    found: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return found
