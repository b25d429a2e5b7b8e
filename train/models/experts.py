"""A mixture of experts in place of the feed-forward layer, as Mixtral has it (Jiang et al. 2024, section 2.1).

Legend: n rows, t tokens, d width, f feed-forward width, e experts, k experts per token. Parameters have the names and
layouts of transformers' Mixtral and Qwen3-MoE: gate and up projections of all experts in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.models.shape import Shape
from gristmill.train.parallel.row_split import RowSplit


class Router(nn.Module):
    """Probabilities of experts: a linear layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> float32 probabilities (..., e)."""
        return F.linear(x, self.weight).float().softmax(dim=-1)


class Experts(nn.Module):
    """All experts' SwiGLU layers, each applied to its own tokens by one grouped product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, 2 * shape.ffn_width, shape.width))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.width, shape.ffn_width))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Tokens sorted by expert (n t k, d) -> the same shape.

        Args:
            x: tokens.
            ends: (e,) int32, where each expert's tokens end.
        """
        gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)


class MixtureOfExperts(nn.Module):
    """Each token through its k likeliest experts, weighted by their probabilities, which are made to sum to one.

    Attributes:
        load: (e,) int64, tokens that each expert got in the last forward pass.
        row_split: the processes that compute the same rows, if there are several: the loss and the load are of them
            all.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Router(shape)
        self.experts = Experts(shape)
        self.load: Tensor | None = None
        self.row_split: RowSplit | None = None

    def forward(self, x: Tensor, trained: Tensor | None = None) -> Tensor:
        """(n, t, d) -> (n, t, d).

        Args:
            x: normalised input.
            trained: (n,) what the load-balancing loss of each row is weighted with; without it there is none.
        """
        n, t, d = x.shape
        k = self.shape.experts_per_token
        probabilities = self.gate(x)
        weights, chosen = probabilities.topk(k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        # A sum of one-hot columns, not a histogram, whose order of additions is not fixed on GPUs.
        load = F.one_hot(chosen, self.shape.experts).sum(dim=(1, 2))
        ends = load.sum(dim=0).cumsum(0).int()
        processes = 1 if self.row_split is None else self.row_split.size
        if self.row_split is not None:
            load = self.row_split.summed(load)
        self.load = load.sum(dim=0)
        if trained is not None:
            # Of a share of each row's tokens the mean of f P over all of them is that of the share over their number.
            balance = balancing_loss(probabilities, load / processes) / processes
            x = _WithLoss.apply(x, (balance * trained).sum() * self.shape.load_balancing)
        by_expert = chosen.flatten().argsort(stable=True)
        out = self.experts(x.reshape(-1, d)[by_expert // k], ends)
        out = out * weights.flatten()[by_expert, None].to(out.dtype)
        return out[by_expert.argsort()].view(n, t, k, d).sum(dim=2)


def balancing_loss(probabilities: Tensor, load: Tensor) -> Tensor:
    """The load-balancing loss of each row, (n,): e times the sum of f P over experts (Fedus et al. 2021, equation 4).

    f is the number of tokens that chose an expert per token of the row, P the mean of its probability; k where experts
    are equally busy. Taken row by row, it does not depend on which rows are computed together.

    Args:
        probabilities: (n, t, e).
        load: (n, e) tokens of each row that chose each expert.
    """
    _, t, experts = probabilities.shape
    return experts * (load / t * probabilities.mean(dim=1)).sum(dim=1)


class _WithLoss(torch.autograd.Function):
    """Passes a tensor on, and adds a loss to whatever is minimised after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


def expert_loads(model: nn.Module) -> list[Tensor]:
    """Tokens per expert (e,) of every layer in the last forward pass, from the first layer on; empty if dense."""
    layers = (module for module in model.modules() if isinstance(module, MixtureOfExperts))
    return [layer.load for layer in layers if layer.load is not None]


def report_loads(loads: Sequence[float], experts: int) -> dict[str, Any]:
    """How busy experts were: their largest and smallest load of any layer, over that of equally busy ones.

    Args:
        loads: tokens of each expert, layer by layer; none if dense.
        experts: per layer.
    """
    layers = [loads[start : start + experts] for start in range(0, len(loads), experts or 1)]
    relative = [load * experts / total for layer in layers if (total := sum(layer)) for load in layer]
    return {"experts": {"largest_load": max(relative), "smallest_load": min(relative)}} if relative else {}
