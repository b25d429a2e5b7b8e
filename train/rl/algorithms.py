"""Algorithms of `rl`: what each learns from a batch of rewarded answers."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from gristmill.mixtures.schema.rl import Rl
from gristmill.train.rl.policy_gradient import (
    group_advantages,
    groups_without_variance,
    kl_estimate,
    token_weights,
)
from gristmill.train.rl.rollout import Rollouts


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


def learn_from(rollouts: Rollouts, section: Rl) -> None:
    """Compute advantages and weights from rewards and log-probabilities."""
    mask = rollouts.mask
    rollouts.flat.copy_(groups_without_variance(rollouts.totals, section.group_size))
    match section.algorithm:
        case "grpo":
            advantages = group_advantages(
                rollouts.totals, section.group_size, section.advantage_scale
            )
            rollouts.advantages.copy_(advantages[:, None] * mask)
        case "distill":
            rollouts.advantages.copy_(
                teacher_advantages(rollouts.old, rollouts.reference, mask)
            )
        case _:
            assert_never(section.algorithm)
    counted = mask & rollouts.ended[:, None] if section.mask_truncated else mask
    for weights, of_step in zip(
        rollouts.weights.split(section.global_batch_size),
        counted.split(section.global_batch_size),
        strict=True,
    ):
        weights.copy_(
            token_weights(of_step, section.normalisation, section.max_new_tokens)
        )
