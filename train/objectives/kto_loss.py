"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): a loss over single answers that are desirable or not.

Legend, per answer: g = log pi(y|x) - log pi0(y|x), summed over the answer's tokens, is what the policy pi has gained
over the frozen reference pi0, in nats; z is the same for answers to other prompts, averaged, an estimate of
KL(pi || pi0) that is no less than zero. beta is the strength of the tie to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kto_loss(
    gains: Tensor, desirable: Tensor, baseline: Tensor, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """w_D (1 - sigma(beta (g - z))) of a desirable answer, w_U (1 - sigma(beta (z - g))) of another, (n,).

    Equation 7 of the paper, up to the constant that its authors' code and TRL leave out too.

    Args:
        gains: (n,) g.
        desirable: (n,) bool.
        baseline: z, a scalar without gradient.
        beta, desirable_weight, undesirable_weight: see `mixtures.posttraining.Dpo`.
    """
    apart = torch.where(desirable, gains - baseline, baseline - gains)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-beta * apart)


def baseline_of(mismatched_gains: Tensor) -> Tensor:
    """z from the gains (n,) of answers to other prompts: their mean, and zero where that is negative."""
    return mismatched_gains.detach().mean().clamp(min=0.0)


def weights_to_balance(desirable: int, undesirable: int, desirable_weight: float, undesirable_weight: float) -> float:
    """How the two kinds weigh in all: w_D n_D / (w_U n_U), which should lie between 1 and 4/3 (equation 8)."""
    return desirable_weight * desirable / (undesirable_weight * undesirable)
