"""Losses of policies and critics as pure functions of log-probabilities, advantages and masks.

Legend: n answers, r tokens of the longest; everything is (n, r) unless it says otherwise. Position j is the answer's
j-th token; where the mask is 0 nothing counts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
Normalisation = Literal["sequence", "token", "constant"]


def surrogate_loss(
    logps: Tensor, old: Tensor, advantages: Tensor, clip: float, clip_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate per token: -min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A).

    Schulman et al. 2017, equation 7; with another bound above it is DAPO's "clip-higher" (Yu et al. 2025, section 3.1).

    Args:
        logps, old: log-probabilities of the tokens under the policy and under the one that drew them.
        advantages: of each token; (n, 1) where all of an answer have the same.
        clip, clip_high: how far the ratio may fall or rise; `clip` both ways if the latter is absent.

    Returns:
        the loss, and (bool) where the clipped term is the smaller one: there the gradient is zero.
    """
    ratio = (logps - old).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip, 1.0 + (clip if clip_high is None else clip_high)) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """The critic's loss per token: half the squared error, or that of the clipped estimate where it is larger.

    Args:
        values, old: the critic's estimates, and those from before the update.
        returns: what they should have been.
        clip: how far an estimate may move from the old one and still lower the loss (OpenAI baselines, ppo2); not
            limited if None.
    """
    error = (values - returns).square()
    if clip is not None:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    return 0.5 * error


def kl_estimate(logps: Tensor, reference: Tensor, kind: KlEstimator) -> Tensor:
    """KL(policy || reference) per token, estimated from tokens that the policy drew (Schulman 2020, "Approximating KL
    divergence"). With x = log(policy / reference):

    k1 = x: unbiased, of large variance, may be negative. k2 = x^2 / 2: biased, never negative; its gradient is that of
    the divergence. k3 = exp(-x) - 1 + x: unbiased and never negative.
    """
    x = logps - reference
    match kind:
        case "k1":
            return x
        case "k2":
            return 0.5 * x.square()
        case "k3":
            return torch.expm1(-x) + x


def kl_loss(logps: Tensor, old: Tensor, reference: Tensor, kind: KlEstimator, corrected: bool) -> Tensor:
    """The divergence as a part of the loss per token: its estimate, perhaps times the ratio of new to old probability.

    An expectation under the policy has a gradient through its own probabilities too, which an estimate from drawn
    tokens lacks; the ratio, 1 in value in the first update, brings it back (DeepSeek-V3.2 2025, section 3.1).
    """
    estimate = kl_estimate(logps, reference, kind)
    return (logps - old).exp() * estimate if corrected else estimate


def token_weights(mask: Tensor, kind: Normalisation, most_tokens: int) -> Tensor:
    """What each token's loss is multiplied with, so that the sum over a step's n answers, divided by n, is its loss.

    Args:
        mask: (n, r) of all answers of an optimizer step, however they are cut into micro-batches.
        kind: `sequence`: the mean over answers of the mean over their tokens (GRPO, Shao et al. 2024, equation 3);
            `token`: the mean over all tokens (DAPO, Yu et al. 2025, equation 8); `constant`: tokens out of
            `most_tokens` per answer (Dr. GRPO, Liu et al. 2025, section 3.2).
        most_tokens: that an answer may have.
    """
    mask = mask.float()
    match kind:
        case "sequence":
            return mask / mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        case "token":
            return mask * (len(mask) / mask.sum().clamp(min=1.0))
        case "constant":
            return mask / most_tokens
