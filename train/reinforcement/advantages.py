"""How much better a token was than expected: beside the other answers to its prompt, or beside a critic's estimate.

Legend: n answers, g per prompt and side by side, r tokens of the longest.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to the standard deviation that advantages are divided by (TRL's GRPOTrainer)."""
WHITENING_FLOOR = 1e-8
"""Added to the variance that PPO's advantages are divided by (TRL's masked_whiten)."""
Scale = Literal["group", "batch", "none"]


def group_advantages(rewards: Tensor, group_size: int, scale: Scale) -> Tensor:
    """Each answer's reward less the mean of its group, perhaps divided by a standard deviation; (n,).

    Shao et al. 2024, section 4.1.2; without the division Liu et al. 2025 (Dr. GRPO). The deviation is the unbiased one
    (n - 1), as in TRL.

    Args:
        rewards: (n,), the answers to a prompt side by side.
        group_size: g.
        scale: by the deviation of the group, of the whole batch, or by nothing.
    """
    groups = rewards.view(-1, group_size)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    if scale == "none":
        return advantages
    deviation = groups.std(dim=1).repeat_interleave(group_size) if scale == "group" else rewards.std()
    return advantages / (deviation + STD_FLOOR)


def groups_without_variance(rewards: Tensor, group_size: int) -> Tensor:
    """Which answers' groups got one and the same reward, so that nothing can be learned from them; (n,) bool."""
    groups = rewards.view(-1, group_size)
    return (groups == groups[:, :1]).all(dim=1).repeat_interleave(group_size)


def token_rewards(rewards: Tensor, divergence: Tensor, kl_weight: float, mask: Tensor) -> Tensor:
    """PPO's reward of each token, (n, r): less for its divergence, and the answer's own reward at its last token.

    Ouyang et al. 2022, equation 2, as a penalty per token (Stiennon et al. 2020, section 3.4).

    Args:
        rewards: (n,) of the answers.
        divergence: (n, r) from the reference, per token.
        kl_weight: beta.
        mask: (n, r) bool, each row a run of tokens from its beginning; at least one.
    """
    given = -kl_weight * divergence * mask
    last = mask.sum(dim=1, keepdim=True) - 1
    return given.scatter_add(1, last, rewards[:, None].to(given.dtype))


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, discount: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """GAE(lambda) of Schulman et al. 2016, equation 16: advantages and returns, (n, r) each.

    An answer that was cut ends like one that came to its end: nothing is to come behind its last token.

    Args:
        rewards: of each token.
        values: what the critic expected before each token.
        mask: bool, each row a run of tokens from its beginning.
        discount: gamma.
        gae_lambda: lambda.

    Returns:
        A_t = sum over k of (gamma lambda)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), and A_t + V_t, which the critic is
        to learn; 0 where the mask is.
    """
    real = mask.to(values.dtype)
    rewards, values = rewards * real, values * real
    advantages = torch.zeros_like(values)
    following, after = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        surprise = rewards[:, t] + discount * after - values[:, t]
        following = (surprise + discount * gae_lambda * following) * real[:, t]
        advantages[:, t], after = following, values[:, t]
    return advantages, (advantages + values) * real


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Values with mean 0 and variance 1 over the mask, 0 elsewhere; the variance is the unbiased one."""
    chosen = values[mask]
    variance = chosen.var() if len(chosen) > 1 else torch.zeros((), dtype=values.dtype, device=values.device)
    return (values - chosen.mean()) * torch.rsqrt(variance + WHITENING_FLOOR) * mask
