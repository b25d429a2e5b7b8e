"""Losses alone: pure functions, tensors in, tensors out. Shapes are in each function's
description.

Legend: n rows (or answers, or pairs), t tokens, d width, v ids. A target of IGNORED
(-100) counts for nothing.
"""

from __future__ import annotations

from gristmill.train.objectives.losses import (
    IGNORED,
    cross_entropy,
    next_tokens,
    score_tokens,
    sequence_logps,
    weighted_nll,
)
from gristmill.train.objectives.preference_losses import (
    dpo_loss,
    hinge_loss,
    ipo_loss,
    normalised_dpo_loss,
    orpo_loss,
    robust_dpo_loss,
    simpo_loss,
)
from gristmill.train.objectives.reward_pairs import reward_loss
from gristmill.train.rl.policy_gradient import (
    group_advantages,
    kl_estimate,
    surrogate_loss,
    token_weights,
)

__all__ = [
    "IGNORED",
    "cross_entropy",
    "dpo_loss",
    "group_advantages",
    "hinge_loss",
    "ipo_loss",
    "kl_estimate",
    "next_tokens",
    "normalised_dpo_loss",
    "orpo_loss",
    "reward_loss",
    "robust_dpo_loss",
    "score_tokens",
    "sequence_logps",
    "simpo_loss",
    "surrogate_loss",
    "token_weights",
    "weighted_nll",
]
