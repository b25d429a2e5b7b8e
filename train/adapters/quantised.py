"""Frozen weights in 4 or 8 bits under adapters that are trained (QLoRA, Dettmers et al. 2023).

A matrix has its values again only while it is multiplied, in the forward pass and once more in the backward pass, which
needs no gradient of it. Rounded matrices are not parameters: every process holds all of them (an eighth or a quarter of
what they are in float32), and no checkpoint does, since rounding what the training starts from gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.mixtures.posttraining import RoundedBase
from gristmill.train.models.int8 import dequantised, quantised


@dataclass(frozen=True)
class Int8Weight:
    """A matrix as int8 (out, in) with one float32 scale per row (out, 1); see models.int8."""

    values: Tensor
    scales: Tensor

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The matrix that is meant, (out, in)."""
        return dequantised(self.values, self.scales).to(dtype)

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class Nf4Weight:
    """A matrix in normal floats of 4 bits with a scale per 64 of them, scales in 8 bits: bitsandbytes' layout."""

    codes: Tensor
    state: Any

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The matrix that is meant, (out, in)."""
        from bitsandbytes.functional import dequantize_4bit

        found: Tensor = dequantize_4bit(self.codes, self.state)
        return found.to(dtype)

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
