"""AdamW, its parameter groups, and an update that a flag on the device can hold back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gristmill.mixtures.optimizer import Optimizer


def make_optimizer(model: nn.Module, section: Optimizer) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter 2019) that decays matrices only, not the gains of norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, eps=section.eps, fused=True)


def clip_gradients(model: nn.Module, most: float) -> Tensor:
    """Scale all gradients down together if their global norm exceeds `most`; returns the norm before (a scalar)."""
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def update(optimizer: torch.optim.AdamW, learning_rate: float, bad: Tensor) -> None:
    """Make one update, or none where `bad` (a scalar bool on the device) is true.

    The fused kernel itself looks at `found_inf`, the flag that PyTorch's gradient scaler uses: weights, moments and
    step counts stay as they were, and the host need not wait to know.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.grad_scale, optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    optimizer.zero_grad(set_to_none=True)
