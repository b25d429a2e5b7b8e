"""Mixture of experts in place of the feed-forward layer, as in Mixtral (Jiang et al.
2024, section 2.1).

Legend: n rows, t tokens, d width, f feed-forward width, e experts, k experts per token.
Parameters have the names and layouts of transformers' Mixtral and Qwen3-MoE: gate and
up projections of all experts in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.distributed.context_parallel import RowSplit
from gristmill.train.models.model_config import Shape


class Experts(nn.Module):
    """SwiGLU layers of all experts, each applied to its tokens in one grouped product.

    Counts stay on the device in bfloat16 on GPUs of compute capability 9.0 or higher;
    elsewhere torch's `grouped_mm` copies the offsets to the host and loops over experts.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(
            torch.empty(shape.experts, 2 * shape.ffn_width, shape.width)
        )
        self.down_proj = nn.Parameter(
            torch.empty(shape.experts, shape.width, shape.ffn_width)
        )

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Tokens sorted by expert (n t k, d) -> the same shape.

        Args:
            x: tokens.
            counts: (e,) int64, number of tokens of each expert.
        """
        m = len(x)
        # The grouped product has no gradient for zero tokens; a zero token contributes
        # nothing.
        x, ends = (
            (x, counts.cumsum(0))
            if m
            else (F.pad(x, (0, 0, 0, 1)), torch.ones_like(counts))
        )
        ends = ends.int()
        gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(
            2, dim=-1
        )
        return F.grouped_mm(
            F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends
        )[:m]


class MixtureOfExperts(nn.Module):
    """Route each token through its k likeliest experts, weighted by their
    probabilities.

    The probabilities are normalised to sum 1 if `norm_topk_prob` is set.

    Attributes:
        load: (e,) int64, tokens of each expert in the last forward pass.
        row_split: processes that compute the same rows, if several; loss and load cover
            all of them.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)
        self.load: Tensor | None = None
        self.row_split: RowSplit | None = None

    def forward(self, x: Tensor, trained: Tensor | None = None) -> Tensor:
        """(n, t, d) -> (n, t, d).

        Args:
            x: normalised input.
            trained: (n,) weight of each row's load-balancing loss; without it there is
                no such loss.
        """
        n, t, d = x.shape
        k = self.shape.experts_per_token
        probabilities = self.gate(x).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(k, dim=-1)
        if self.shape.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # A sum of comparisons, as histograms are not deterministic on GPUs.
        experts = torch.arange(self.shape.experts, device=x.device)
        load = (chosen.unsqueeze(-1) == experts).sum(dim=(1, 2))
        counts = load.sum(dim=0)
        processes = 1 if self.row_split is None else self.row_split.size
        if self.row_split is not None:
            load = self.row_split.summed(load)
        self.load = load.sum(dim=0)
        if trained is not None:
            # The mean of f P over a row is the mean over the processes' shares of its
            # tokens.
            balance = balancing_loss(probabilities, load / processes) / processes
            x = _WithLoss.apply(
                x, (balance * trained).sum() * self.shape.load_balancing
            )
        by_expert = chosen.flatten().argsort(stable=True)
        out = self.experts(x.reshape(-1, d)[by_expert // k], counts)
        out = out * weights.flatten()[by_expert, None].to(out.dtype)
        return out[by_expert.argsort()].view(n, t, k, d).sum(dim=2)


def balancing_loss(probabilities: Tensor, load: Tensor) -> Tensor:
    """Load-balancing loss of each row, (n,): e times the sum of f P over experts (Fedus
    et al. 2021, equation 4).

    f is the number of tokens routed to an expert per token of the row, P its mean
    probability; the loss is k under perfect balance. Computed per row, it does not
    depend on the batch.

    Args:
        probabilities: (n, t, e).
        load: (n, e) tokens of each row routed to each expert.
    """
    _, t, experts = probabilities.shape
    return experts * (load / t * probabilities.mean(dim=1)).sum(dim=1)


class _WithLoss(torch.autograd.Function):
    """Identity that adds a loss to the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


def expert_loads(model: nn.Module) -> list[Tensor]:
    """Tokens per expert (e,) of every layer in the last forward pass; empty if
    dense.
    """
    layers = (
        module for module in model.modules() if isinstance(module, MixtureOfExperts)
    )
    return [layer.load for layer in layers if layer.load is not None]


def report_loads(loads: Sequence[float], experts: int) -> dict[str, dict[str, float]]:
    """Largest and smallest load of an expert in any layer, relative to a balanced load.

    Args:
        loads: tokens of each expert, layer by layer; empty if dense.
        experts: per layer.
    """
    layers = [
        loads[start : start + experts] for start in range(0, len(loads), experts or 1)
    ]
    relative = [
        load * experts / total
        for layer in layers
        if (total := sum(layer))
        for load in layer
    ]
    return (
        {"experts": {"largest_load": max(relative), "smallest_load": min(relative)}}
        if relative
        else {}
    )
