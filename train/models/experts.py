"""A mixture of experts in place of the feed-forward layer, as Mixtral has it (Jiang et al. 2024, section 2.1).

Legend: n rows, t tokens, d width, f feed-forward width, e experts, k experts per token. Parameters have the names and
layouts of transformers' Mixtral and Qwen3-MoE: gate and up projections of all experts in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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


@dataclass(frozen=True)
class Dealt:
    """Experts that lie with several processes, equally many with each, which tokens are sent to and come back from
    (GShard, Lepikhin et al. 2020, section 3.2).

    Attributes:
        group: the processes, in the order of their experts.
        size: how many.
        averaged_over: processes over which gradients are to be the mean; those of these experts are sums over `group`.
        replicas: processes that have the same experts and other tokens, if there are any.
    """

    group: dist.ProcessGroup
    size: int
    averaged_over: int
    replicas: dist.ProcessGroup | None = None

    def arriving(self, counts: Tensor) -> Tensor:
        """How many tokens each process has for each of this one's experts, (size, e / size), from those that this one
        has for each of all (e,)."""
        found = torch.empty_like(counts)
        dist.all_to_all_single(found, counts, group=self.group)
        return found.view(self.size, -1)

    def exchanged(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Tokens (m, d), so many of which are for each process -> those that come from each; gradients go back."""
        found: Tensor = _Exchanged.apply(x, sent, received, self)  # type: ignore[no-untyped-call]
        return found

    def own(self, weight: Any, dtype: torch.dtype) -> Tensor:
        """This process's experts' weights of all, in the dtype of products."""
        found: Tensor = _Own.apply(weight.to_local(), dtype, self)  # type: ignore[no-untyped-call]
        return found


class Experts(nn.Module):
    """All experts' SwiGLU layers, each applied to its own tokens by one grouped product.

    Attributes:
        dealt: where they are; all of them are here if absent.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, 2 * shape.ffn_width, shape.width))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.width, shape.ffn_width))
        self.dealt: Dealt | None = None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Tokens sorted by expert (n t k, d) -> the same shape.

        Args:
            x: tokens.
            counts: (e,) int64, how many each expert has.
        """
        if self.dealt is None:
            return _grouped(x, counts, self.gate_up_proj, self.down_proj)
        here, dealt = self.dealt.arriving(counts), self.dealt
        sent, received = counts.view(dealt.size, -1).sum(dim=1).tolist(), here.sum(dim=1).tolist()
        x = dealt.exchanged(x, sent, received)
        # They come sorted by process, and by expert within each.
        experts = torch.arange(here.shape[1], device=x.device).repeat(dealt.size)
        by_expert = experts.repeat_interleave(here.flatten()).argsort(stable=True)
        out = _grouped(
            x[by_expert], here.sum(dim=0), dealt.own(self.gate_up_proj, x.dtype), dealt.own(self.down_proj, x.dtype)
        )
        return dealt.exchanged(out[by_expert.argsort()], received, sent)


def _grouped(x: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Tokens sorted by expert (m, d) -> the same shape."""
    m = len(x)
    # The grouped product has no gradient of no tokens: one that is nought adds nothing to any.
    x, ends = (x, counts.cumsum(0)) if m else (F.pad(x, (0, 0, 0, 1)), torch.ones_like(counts))
    ends = ends.int()
    gate, up = F.grouped_mm(x, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)[:m]


class _Exchanged(torch.autograd.Function):
    """Sends tokens to the processes that they are for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], dealt: Dealt) -> Tensor:
        ctx.sent, ctx.received, ctx.dealt = sent, received, dealt
        return _sent(x, sent, received, dealt)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _sent(gradients[0], ctx.received, ctx.sent, ctx.dealt), None, None, None


def _sent(x: Tensor, sent: list[int], received: list[int], dealt: Dealt) -> Tensor:
    found = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(found, x.contiguous(), received, sent, group=dealt.group)
    return found


class _Own(torch.autograd.Function):
    """Master weights in the dtype of products; their gradients as FSDP would reduce them."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, dealt: Dealt) -> Tensor:
        ctx.dealt = dealt
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dealt: Dealt = ctx.dealt
        found = gradients[0].float() / dealt.averaged_over
        if dealt.replicas is not None:
            dist.all_reduce(found, group=dealt.replicas)
        return found, None, None


class MixtureOfExperts(nn.Module):
    """Each token through its k likeliest experts, weighted by their probabilities, which are divided by their sum unless the
    shape says otherwise.

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
        if self.shape.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # A sum of one-hot columns, not a histogram, whose order of additions is not fixed on GPUs.
        load = F.one_hot(chosen, self.shape.experts).sum(dim=(1, 2))
        counts = load.sum(dim=0)
        processes = 1 if self.row_split is None else self.row_split.size
        if self.row_split is not None:
            load = self.row_split.summed(load)
        self.load = load.sum(dim=0)
        if trained is not None:
            # Of a share of each row's tokens the mean of f P over all of them is that of the share over their number.
            balance = balancing_loss(probabilities, load / processes) / processes
            x = _WithLoss.apply(x, (balance * trained).sum() * self.shape.load_balancing)
        by_expert = chosen.flatten().argsort(stable=True)
        out = self.experts(x.reshape(-1, d)[by_expert // k], counts)
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
