"""Losses over pairs of a preferred and a rejected answer: pure functions of log-probabilities.

Legend, per pair: c and r are log pi(y|x) of the chosen and the rejected answer under the policy, c0 and r0 under the
frozen reference, each summed over an answer's tokens; |c| and |r| are those tokens' numbers. beta is the strength of
the tie to the reference, and delta = (c - c0) - (r - r0), the margin in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.mixtures.posttraining import Dpo, PreferenceLoss

REFERENCE_FREE = ("simpo", "orpo")
"""Losses that look at the policy alone."""


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of n pairs.

    Attributes:
        chosen, rejected: (n,) float32, summed over the answer's tokens, under the policy.
        reference_chosen, reference_rejected: (n,) the same under the frozen reference.
        chosen_tokens, rejected_tokens: (n,) float32, tokens that were summed over, at least one.
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def gains(self) -> tuple[Tensor, Tensor]:
        """(c - c0, r - r0): what the policy has gained over the reference, in nats."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """(c / |c|, r / |r|): log-probability per token under the policy."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


@dataclass(frozen=True)
class LossSettings:
    """What a loss is told beside the log-probabilities; see `mixtures.posttraining.Dpo`."""

    beta: float
    label_smoothing: float = 0.0
    gamma_ratio: float = 0.5
    odds_weight: float = 0.1
    sft_weight: float = 0.0

    @classmethod
    def of(cls, section: Dpo) -> LossSettings:
        """What a manifest says."""
        return cls(section.beta, section.label_smoothing, section.gamma_ratio, section.odds_weight, section.sft_weight)


def preference_loss(
    kind: PreferenceLoss, logps: PairLogps, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each pair.

    Args:
        kind: which one; the functions below say where each comes from.
        logps: of n pairs.
        settings: beta and what some losses need beside it.

    Returns:
        losses (n,), and the implicit rewards of chosen and rejected answers (n,) each, without gradient: beta times
        what was gained over the reference, or for losses without one beta times the log-probability per token.
    """
    losses = LOSSES[kind](logps, settings)
    if settings.sft_weight:
        # Per sequence, then over pairs: RPO's term (Pang et al. 2024, equation 1).
        losses = losses - settings.sft_weight * logps.means[0]
    gained = logps.means if kind in REFERENCE_FREE else logps.gains
    chosen, rejected = (settings.beta * part.detach() for part in gained)
    return losses, chosen, rejected


def sigmoid(logps: PairLogps, settings: LossSettings) -> Tensor:
    """-log sigma(beta delta): DPO (Rafailov et al. 2023, equation 7)."""
    chosen, rejected = logps.gains
    return -F.logsigmoid(settings.beta * (chosen - rejected))


def cdpo(logps: PairLogps, settings: LossSettings) -> Tensor:
    """Labels that are wrong with probability e: -(1 - e) log sigma(beta delta) - e log sigma(-beta delta).

    Conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences").
    """
    chosen, rejected = logps.gains
    margin, wrong = settings.beta * (chosen - rejected), settings.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)


def robust(logps: PairLogps, settings: LossSettings) -> Tensor:
    """The same noise, without bias: (-(1 - e) log sigma(beta delta) + e log sigma(-beta delta)) / (1 - 2 e).

    Robust DPO (Chowdhury, Kini & Natarajan 2024, equation 12).
    """
    chosen, rejected = logps.gains
    margin, wrong = settings.beta * (chosen - rejected), settings.label_smoothing
    return (-(1 - wrong) * F.logsigmoid(margin) + wrong * F.logsigmoid(-margin)) / (1 - 2 * wrong)


def hinge(logps: PairLogps, settings: LossSettings) -> Tensor:
    """max(0, 1 - beta delta): RSO's loss (Liu et al. 2023; SLiC, Zhao et al. 2023)."""
    chosen, rejected = logps.gains
    return torch.relu(1 - settings.beta * (chosen - rejected))


def ipo(logps: PairLogps, settings: LossSettings) -> Tensor:
    """((c - c0) / |c| - (r - r0) / |r| - 1 / (2 beta))^2: IPO over means of tokens.

    Azar et al. 2023, equation 17, by the convention that its authors confirmed for TRL (issue 1265 there).
    """
    chosen, rejected = logps.gains
    return (chosen / logps.chosen_tokens - rejected / logps.rejected_tokens - 1 / (2 * settings.beta)) ** 2


def ipo_sum(logps: PairLogps, settings: LossSettings) -> Tensor:
    """(delta - 1 / (2 beta))^2: IPO over sums, as the paper writes it and the first DPO code computes it."""
    chosen, rejected = logps.gains
    return (chosen - rejected - 1 / (2 * settings.beta)) ** 2


def sigmoid_norm(logps: PairLogps, settings: LossSettings) -> Tensor:
    """-log sigma(beta ((c - c0) / |c| - (r - r0) / |r|)): DPO per token (Tulu 3, Lambert et al. 2024, equation 6)."""
    chosen, rejected = logps.gains
    return -F.logsigmoid(settings.beta * (chosen / logps.chosen_tokens - rejected / logps.rejected_tokens))


def simpo(logps: PairLogps, settings: LossSettings) -> Tensor:
    """-log sigma(beta (c / |c| - r / |r|) - gamma), gamma = ratio * beta (Meng, Xia & Chen 2024, equation 6)."""
    chosen, rejected = logps.means
    return -F.logsigmoid(settings.beta * (chosen - rejected - settings.gamma_ratio))


def orpo(logps: PairLogps, settings: LossSettings) -> Tensor:
    """-c / |c| - lambda log sigma(log odds(c) - log odds(r)), odds of the mean token (Hong, Lee & Thorne 2024, 4.2)."""
    chosen, rejected = logps.means
    odds = (chosen - rejected) - (_log_one_minus_exp(chosen) - _log_one_minus_exp(rejected))
    return -chosen - settings.odds_weight * F.logsigmoid(odds)


def loss_at_start(kind: PreferenceLoss, beta: float) -> float | None:
    """What a loss with a reference is where the policy still is that reference; None for the others."""
    if kind in REFERENCE_FREE:
        return None
    special = {"hinge": 1.0, "ipo": 1 / (4 * beta**2), "ipo_sum": 1 / (4 * beta**2)}
    return special.get(kind, math.log(2.0))


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, exact near 0 and far from it (Maechler 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    # Each branch sees only what it is exact for: the other's infinities would poison the gradient.
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -1.0))),
                       torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


LOSSES: dict[PreferenceLoss, Callable[[PairLogps, LossSettings], Tensor]] = {
    "sigmoid": sigmoid, "cdpo": cdpo, "robust": robust, "hinge": hinge, "ipo": ipo, "ipo_sum": ipo_sum,
    "sigmoid_norm": sigmoid_norm, "simpo": simpo, "orpo": orpo,
}
