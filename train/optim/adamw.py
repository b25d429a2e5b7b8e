"""AdamW (Loshchilov & Hutter 2019), fused."""

from __future__ import annotations

import torch

from gristmill.mixtures.schema.optimizer import Optimizer
from gristmill.train.optim.builder import Parameters, decay_groups


def build(parameters: Parameters, section: Optimizer) -> torch.optim.AdamW:
    """Create PyTorch's fused AdamW with its moments.

    A checkpoint that is saved or loaded before the first step would otherwise create
    them by a step without gradients, and count that step.
    """
    optimizer = torch.optim.AdamW(
        decay_groups(parameters, section),
        lr=section.learning_rate,
        betas=section.decays,
        eps=section.eps,
        fused=True,
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer
