"""Advantages of answers, and the losses of policies, as pure functions of numbers and
masks.

Notation: n answers, g per prompt and adjacent, r tokens of the longest; arrays are (n,
r) unless stated otherwise. Position j is the answer's j-th token; tokens outside the
mask are ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.mixtures.schema.rl import KlEstimator, Normalisation, Scale

STD_FLOOR = 1e-4
"""Added to the divisor of advantages, a standard deviation (TRL's GRPOTrainer)."""


def group_advantages(rewards: Tensor, group_size: int, scale: Scale) -> Tensor:
    """Rewards minus the mean of their group, optionally divided by a standard
    deviation; (n,).

    Shao et al. 2024, section 4.1.2; without the division Liu et al. 2025 (Dr. GRPO);
    minus the mean of the other rewards of the group Ahmadian et al. 2024 (RLOO). The
    deviation is the unbiased one (n - 1), as in TRL.

    Args:
        rewards: (n,), answers to a prompt adjacent.
        group_size: g.
        scale: divisor: the deviation of the group, of the batch, none, or (g - 1) / g,
            which gives the difference from the mean of the other rewards.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]), 2, "none").tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    groups = rewards.view(-1, group_size)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    if scale == "none":
        return advantages
    if scale == "leave_one_out":
        return advantages * (group_size / (group_size - 1))
    deviation = (
        groups.std(dim=1).repeat_interleave(group_size)
        if scale == "group"
        else rewards.std()
    )
    return advantages / (deviation + STD_FLOOR)


def groups_without_variance(rewards: Tensor, group_size: int) -> Tensor:
    """Mask of answers whose group has equal rewards, and so no gradient; (n,) bool."""
    groups = rewards.view(-1, group_size)
    return (groups == groups[:, :1]).all(dim=1).repeat_interleave(group_size)


def surrogate_loss(
    logps: Tensor,
    old: Tensor,
    advantages: Tensor,
    clip: float,
    clip_high: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate per token: -min(ratio A, clip(ratio, 1 - clip, 1 + clip_high)
    A).

    Schulman et al. 2017, equation 7; with another upper bound it is DAPO's
    "clip-higher" (Yu et al. 2025, section 3.1); with an answer's ratio it is GSPO's
    (Zheng et al. 2025, equations 5 and 7).

    Args:
        logps, old: log-probabilities of the tokens under the current and under the
            sampling policy.
        advantages: of each token; (n, 1) if equal for all tokens of an answer.
        clip, clip_high: lower and upper clip of the ratio; `clip` for both if the
            latter is absent.
        mask: (n, r) bool, tokens whose ratios have their geometric mean as the ratio of
            each token of the answer; each token has its own ratio if absent.

    Returns:
        the loss, and a bool mask of tokens whose clipped term is the smaller one: their
        gradient is zero.

    >>> loss, clipped = surrogate_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
    >>> f"{loss.item():.1f}", clipped.item()
    ('-1.2', True)
    """
    log_ratio = logps - old
    if mask is not None:
        tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio * mask).sum(dim=1, keepdim=True) / tokens
    ratio = log_ratio.exp()
    plain = ratio * advantages
    clipped = (
        ratio.clamp(1.0 - clip, 1.0 + (clip if clip_high is None else clip_high))
        * advantages
    )
    return -torch.minimum(plain, clipped), clipped < plain


def kl_estimate(logps: Tensor, reference: Tensor, kind: KlEstimator) -> Tensor:
    """KL(policy || reference) per token, estimated from tokens that the policy drew
    (Schulman 2020, "Approximating KL divergence"). With x = log(policy / reference):

    k1 = x: unbiased, of large variance, may be negative. k2 = x^2 / 2: biased, never
    negative; its gradient is that of the divergence. k3 = exp(-x) - 1 + x: unbiased and
    never negative.

    >>> f"{kl_estimate(torch.tensor([0.5]), torch.tensor([0.0]), 'k3').item():.6f}"
    '0.106531'
    """
    x = logps - reference
    match kind:
        case "k1":
            return x
        case "k2":
            return 0.5 * x.square()
        case "k3":
            return torch.expm1(-x) + x


def kl_loss(
    logps: Tensor, old: Tensor, reference: Tensor, kind: KlEstimator, corrected: bool
) -> Tensor:
    """The divergence as a part of the loss per token: its estimate, perhaps times the
    ratio of new to old probability.

    An expectation under the policy has a gradient through its own probabilities too,
    which an estimate from drawn tokens lacks; the ratio, 1 in value in the first
    update, brings it back (DeepSeek-V3.2 2025, section 3.1).
    """
    estimate = kl_estimate(logps, reference, kind)
    return (logps - old).exp() * estimate if corrected else estimate


def teacher_advantages(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Advantages of on-policy distillation (Agarwal et al. 2024, algorithm 1 with
    lambda 1 and the reverse KL): -log(p_S / p_T) of each token of the student's
    answers, less its mean over the batch; (n, r).

    grad KL(p_S || p_T) = E over v from p_S of log(p_S(v) / p_T(v)) grad log p_S(v), of
    which the drawn tokens are samples. The mean is a baseline: it leaves the
    expectation, and lowers the variance.

    Args:
        student, teacher: (n, r) log-probabilities of the tokens.
        mask: (n, r) bool, the drawn tokens.
    """
    divergence = kl_estimate(student, teacher, "k1")
    return (divergence[mask].mean() - divergence) * mask


def token_weights(mask: Tensor, kind: Normalisation, most_tokens: int) -> Tensor:
    """Weight of each token's loss, such that the sum over a step's n answers, divided
    by n, is the step's loss.

    Args:
        mask: (n, r) of all answers of an optimizer step, independent of its
            micro-batches.
        kind: `sequence`: the mean over answers of the mean over their tokens (GRPO,
            Shao et al. 2024, equation 3); `token`: the mean over all tokens (DAPO, Yu
            et al. 2025, equation 8); `constant`: tokens out of `most_tokens` per answer
            (Dr. GRPO, Liu et al. 2025, section 3.2).
        most_tokens: that an answer may have.

    >>> token_weights(torch.tensor([[True, True], [True, False]]), "sequence", 2).tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    mask = mask.float()
    match kind:
        case "sequence":
            return mask / mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        case "token":
            return mask * (len(mask) / mask.sum().clamp(min=1.0))
        case "constant":
            return mask / most_tokens
