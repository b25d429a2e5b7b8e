"""Losses over pairs of a preferred and a rejected answer: pure functions of
log-probabilities.

Legend, per pair: c and r are log pi(y|x) of the chosen and the rejected answer under
the policy, c0 and r0 under the frozen reference, each summed over the answer's tokens;
|c| and |r| are numbers of tokens. beta is the strength of the KL penalty, and delta =
(c - c0) - (r - r0), the margin in nats. sigma is the logistic function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.dataprep.user_functions import blaming, load_own, wrong
from gristmill.mixtures.schema.posttraining import (
    LossSettings,
    OwnLoss,
    PolicyDivergence,
    PreferenceLoss,
)
from gristmill.mixtures.user_code import Own

REFERENCE_FREE = ("simpo", "orpo", "cpo")
"""Losses that depend only on the policy."""
DISCOPOP_TEMPERATURE = 0.05
"""tau of Lu et al. 2024, equation 5."""
LARGEST_EXPONENT = 80.0
"""Limit of exponents of log-ratios, so that exp is finite in float32 (TRL's
DPOTrainer).
"""


Both = tuple[Tensor, Tensor]
"""Values (n,) of the chosen and of the rejected answers."""


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of n pairs.

    Attributes:
        chosen, rejected: (n,) float32, summed over the answer's tokens, under the
            policy.
        reference_chosen, reference_rejected: (n,) the same under the frozen reference.
        chosen_tokens, rejected_tokens: (n,) float32, number of summed tokens, at least
            one.
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(c, r, c0, r0)."""
        return (
            self.chosen,
            self.rejected,
            self.reference_chosen,
            self.reference_rejected,
        )

    @property
    def tokens(self) -> Both:
        """(|c|, |r|)."""
        return self.chosen_tokens, self.rejected_tokens

    @property
    def gains(self) -> Both:
        """(c - c0, r - r0): log-ratios of the policy to the reference, in nats."""
        return (
            self.chosen - self.reference_chosen,
            self.rejected - self.reference_rejected,
        )

    def rewards(self, beta: float) -> Both:
        """(beta (c - c0), beta (r - r0))."""
        chosen, rejected = self.gains
        return beta * chosen, beta * rejected

    @property
    def means(self) -> Both:
        """(c / |c|, r / |r|): log-probability per token under the policy."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def preference_loss(
    logps: PairLogps, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each pair.

    Args:
        logps: of n pairs.
        settings: name of a loss (the functions below cite their sources) or the user's
            own, beta and further settings of some losses.

    Returns:
        losses (n,), and the implicit rewards of chosen and rejected answers (n,) each,
        without gradient: beta times the log-ratio to the reference, for `cpo` beta
        times the log-probability, or for other reference-free losses beta times the
        log-probability per token.

    Raises:
        OwnCodeError: the user's own fails, or does not return a loss for each pair.
    """
    kind = settings.loss
    losses = (
        own_losses(kind, logps)
        if isinstance(kind, Own)
        else losses_of(kind, divergence_scores(logps, settings.divergence), settings)
    )
    if settings.sft_weight:
        # Per sequence, then over pairs: RPO's term (Pang et al. 2024, equation 1).
        losses = losses - settings.sft_weight * logps.means[0]
    gained = logps.means if kind in REFERENCE_FREE else logps.gains
    if kind == "cpo":
        gained = logps.sums[:2]
    chosen, rejected = (settings.beta * part.detach() for part in gained)
    return losses, chosen, rejected


def own_losses(own: Own, logps: PairLogps) -> Tensor:
    """Losses (n,) from a user's function.

    Raises:
        OwnCodeError: it fails, or does not return a differentiable loss for each pair.
    """
    function = load_own(own, *(OwnLoss.takes or ()))
    with blaming(own.use):
        losses = function(*logps.sums)
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        returned = type(losses).__name__
    elif losses.shape != logps.chosen.shape:
        returned = f"a tensor of shape {tuple(losses.shape)}"
    elif logps.chosen.requires_grad and not losses.requires_grad:
        returned = "a tensor that has no gradient"
    else:
        return losses
    raise wrong(
        own,
        f"returned {returned}; return a tensor of {len(logps.chosen)} losses, one for "
        "each pair, computed from chosen_logps and rejected_logps by torch, without "
        "detaching them",
    )


def divergence_scores(logps: PairLogps, divergence: PolicyDivergence) -> PairLogps:
    """Pairs whose log-ratios to the reference, x, are replaced by f'(e^x): DPO with
    another f-divergence from the reference as its penalty (Wang et al. 2023,
    "f-DPO").

    f'(u) is log u of the reverse KL, 1 - 1/u of the forward KL, log(2u / (1 + u)) of
    the Jensen-Shannon divergence, and (1 - u^-alpha) / alpha of the alpha-divergence,
    without constants, so that all are 0 where policy and reference are equal.
    """
    if divergence == "reverse_kl":
        return logps
    if divergence == "js":
        chosen, rejected = (math.log(2) + F.logsigmoid(gain) for gain in logps.gains)
    else:
        alpha = 1.0 if divergence == "forward_kl" else divergence
        chosen, rejected = (
            -torch.expm1((-alpha * gain).clamp(max=LARGEST_EXPONENT)) / alpha
            for gain in logps.gains
        )
    equal = torch.zeros_like(chosen)
    return PairLogps(chosen, rejected, equal, equal, *logps.tokens)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log sigma(beta delta): DPO (Rafailov et al. 2023, equation 7).

    With labels that are wrong with probability e: -(1 - e) log sigma(beta delta) - e
    log sigma(-beta delta), conservative DPO (Mitchell 2023, "A note on DPO with noisy
    preferences").

    Args:
        chosen, rejected: (n,) float32, log-probabilities of the answers under the
            policy, summed over their tokens.
        reference_chosen, reference_rejected: (n,), the same under the frozen reference.
        beta: strength of the KL penalty.
        label_smoothing: e.

    Returns:
        the loss of each pair, (n,).

    >>> loss = dpo_loss(*map(torch.tensor, ([-10.0], [-23.0], [-12.0], [-20.0])))
    >>> f"{loss.item():.6f}"  # ln(1 + e^-0.5): the margin is 5 nats
    '0.474077'
    """
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -(1 - label_smoothing) * F.logsigmoid(
        margin
    ) - label_smoothing * F.logsigmoid(-margin)


def robust_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """(-(1 - e) log sigma(beta delta) + e log sigma(-beta delta)) / (1 - 2 e): as
    `dpo_loss`, without bias.

    Robust DPO (Chowdhury, Kini & Natarajan 2024, equation 12). Arguments as for
    `dpo_loss`.

    >>> loss = robust_dpo_loss(*map(torch.tensor, ([-10.0], [-23.0], [-12.0], [-20.0])), label_smoothing=0.1)
    >>> f"{loss.item():.6f}"
    '0.411577'
    """
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    error_rate = label_smoothing
    return (
        -(1 - error_rate) * F.logsigmoid(margin) + error_rate * F.logsigmoid(-margin)
    ) / (1 - 2 * error_rate)


def hinge_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """max(0, 1 - beta delta): RSO's loss (Liu et al. 2023; SLiC, Zhao et al. 2023).
    Arguments as for `dpo_loss`.

    >>> hinge_loss(*map(torch.tensor, ([-10.0], [-23.0], [-12.0], [-20.0]))).item()
    0.5
    """
    return torch.relu(
        1 - beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    )


def ipo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
) -> Tensor:
    """((c - c0) / |c| - (r - r0) / |r| - 1 / (2 beta))^2: IPO (Azar et al. 2023,
    equation 17).

    Arguments as for `dpo_loss`. With numbers of tokens, (n,) each, it uses means over
    tokens, which its authors confirmed for TRL (issue 1265 there); without them sums,
    as in the paper and the first DPO code.

    >>> ipo_loss(*map(torch.tensor, ([-10.0], [-23.0], [-12.0], [-19.0]))).item()  # (6 - 5)^2
    1.0
    """
    chosen_gain = chosen - reference_chosen
    rejected_gain = rejected - reference_rejected
    if chosen_tokens is not None and rejected_tokens is not None:
        chosen_gain = chosen_gain / chosen_tokens
        rejected_gain = rejected_gain / rejected_tokens
    return (chosen_gain - rejected_gain - 1 / (2 * beta)) ** 2


def normalised_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """-log sigma(beta ((c - c0) / |c| - (r - r0) / |r|)): DPO per token (Tulu 3,
    Lambert et al. 2024, equation 6).

    Arguments as for `dpo_loss`, with the numbers of tokens of the answers, (n,) each.

    >>> loss = normalised_dpo_loss(*map(torch.tensor, ([-10.0], [-23.0], [-12.0], [-20.0], [4.0], [6.0])))
    >>> f"{loss.item():.6f}"  # ln(1 + e^-0.1)
    '0.644397'
    """
    chosen_gain = chosen - reference_chosen
    rejected_gain = rejected - reference_rejected
    return -F.logsigmoid(
        beta * (chosen_gain / chosen_tokens - rejected_gain / rejected_tokens)
    )


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    beta: float = 0.1,
    gamma_ratio: float = 0.5,
) -> Tensor:
    """-log sigma(beta (c / |c| - r / |r|) - gamma), gamma = ratio * beta (Meng, Xia &
    Chen 2024, equation 6).

    Args:
        chosen, rejected: (n,) float32, log-probabilities of the answers, summed over
            their tokens; there is no reference.
        chosen_tokens, rejected_tokens: (n,), numbers of tokens.
        beta, gamma_ratio: as in the equation; the authors take beta from 2 to 10.

    >>> loss = simpo_loss(*map(torch.tensor, ([-10.0], [-23.0], [4.0], [6.0])))
    >>> f"{loss.item():.6f}"
    '0.652348'
    """
    return -F.logsigmoid(
        beta * (chosen / chosen_tokens - rejected / rejected_tokens - gamma_ratio)
    )


def orpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    odds_weight: float = 0.1,
) -> Tensor:
    """-c / |c| - lambda log sigma(log odds(c) - log odds(r)), odds of the mean token
    (Hong, Lee & Thorne 2024, 4.2).

    Arguments as for `simpo_loss`; `odds_weight` is lambda.

    >>> loss = orpo_loss(*map(torch.tensor, ([-10.0], [-23.0], [4.0], [6.0])))
    >>> f"{loss.item():.6f}"
    '2.522099'
    """
    better = chosen / chosen_tokens
    worse = rejected / rejected_tokens
    odds = (better - worse) - (_log_one_minus_exp(better) - _log_one_minus_exp(worse))
    return -better - odds_weight * F.logsigmoid(odds)


def cpo_loss(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """-log sigma(beta (c - r)): DPO with a uniform reference (CPO, Xu et al. 2024,
    equation 3), whose
    authors add the chosen answer's own loss, as `sft_weight` does.

    Args:
        chosen, rejected: (n,) float32, log-probabilities of the answers, summed over
            their tokens.
        beta: scale of the margin.
    """
    return -F.logsigmoid(beta * (chosen - rejected))


def exo_loss(chosen: Tensor, rejected: Tensor, label_smoothing: float = 1e-3) -> Tensor:
    """KL(P || Q), P = (sigma(x - y), sigma(y - x)), Q = (1 - e, e): EXO for pairs (Ji et
    al. 2024, equation 16).

    Args:
        chosen, rejected: (n,) float32, rewards of the answers: x = beta (c - c0), y =
            beta (r - r0).
        label_smoothing: e, above 0.
    """
    margin = chosen - rejected
    return margin.sigmoid() * (F.logsigmoid(margin) - math.log1p(-label_smoothing)) + (
        -margin
    ).sigmoid() * (F.logsigmoid(-margin) - math.log(label_smoothing))


def nca_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(x) - log sigma(-x) / 2 - log sigma(-y) / 2: NCA for pairs (Chen et al.
    2024), which keeps chosen answers likely. Arguments as for `exo_loss`.
    """
    return -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2


def bco_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(x) - log sigma(-y): a classifier of single answers (BCO, Jung et al.
    2024), without the running mean of rewards that its authors subtract, as TRL's
    `bco_pair`. Arguments as for `exo_loss`.
    """
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_loss(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """((x - 1/2)^2 + (y + 1/2)^2) / beta^2: SPPO with certain preferences (Wu et al.
    2024, equation 4.7). Arguments as for `exo_loss`.
    """
    return ((chosen - 0.5) ** 2 + (rejected + 0.5) ** 2) / beta**2


def apo_zero_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """sigma(-x) + sigma(y): for chosen answers that are better than the model's
    (APO-zero, D'Oosterlinck et al. 2024, equation 7). Arguments as for `exo_loss`.
    """
    return (-chosen).sigmoid() + rejected.sigmoid()


def apo_down_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """sigma(x) + sigma(y - x): for chosen answers that are worse than the model's
    (APO-down, D'Oosterlinck et al. 2024, equation 8). Arguments as for `exo_loss`.
    """
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def discopop_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-(1 - s) log sigma(d) + s e^-d, d = x - y, s = sigma(d / tau): log-ratio modulated
    loss (DiscoPOP, Lu et al. 2024, equation 5). Arguments as for `exo_loss`.
    """
    margin = chosen - rejected
    modulation = margin / DISCOPOP_TEMPERATURE
    # The product of both exponentials is finite where the second is not.
    return (F.logsigmoid(modulation) - margin).exp() - (
        -modulation
    ).sigmoid() * F.logsigmoid(margin)


def loss_at_start(settings: LossSettings) -> float | None:
    """Value of a loss with a reference while the policy equals the reference; None for
    other losses.
    """
    if isinstance(settings.loss, Own) or settings.loss in REFERENCE_FREE:
        return None
    pair = PairLogps(*torch.zeros(4, 1), *torch.ones(2, 1))
    return losses_of(settings.loss, pair, settings).item()


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, exact near 0 and far from it (Maechler 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    # Each branch is evaluated only in its exact range, as infinities of the other would
    # poison the gradient.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )


def losses_of(kind: PreferenceLoss, pairs: PairLogps, settings: LossSettings) -> Tensor:
    """Losses (n,) by their name in a manifest."""
    beta = settings.beta
    rewards = pairs.rewards(beta)
    match kind:
        case "sigmoid":
            return dpo_loss(*pairs.sums, beta)
        case "cdpo":
            return dpo_loss(*pairs.sums, beta, settings.label_smoothing)
        case "robust":
            return robust_dpo_loss(*pairs.sums, beta, settings.label_smoothing)
        case "hinge":
            return hinge_loss(*pairs.sums, beta)
        case "ipo":
            return ipo_loss(*pairs.sums, beta, *pairs.tokens)
        case "ipo_sum":
            return ipo_loss(*pairs.sums, beta)
        case "sigmoid_norm":
            return normalised_dpo_loss(*pairs.sums, *pairs.tokens, beta)
        case "simpo":
            return simpo_loss(
                *pairs.sums[:2], *pairs.tokens, beta, settings.gamma_ratio
            )
        case "orpo":
            return orpo_loss(*pairs.sums[:2], *pairs.tokens, settings.odds_weight)
        case "cpo":
            return cpo_loss(*pairs.sums[:2], beta)
        case "exo_pair":
            return exo_loss(*rewards, settings.label_smoothing)
        case "nca_pair":
            return nca_loss(*rewards)
        case "bco_pair":
            return bco_loss(*rewards)
        case "sppo_hard":
            return sppo_loss(*rewards, beta)
        case "apo_zero":
            return apo_zero_loss(*rewards)
        case "apo_down":
            return apo_down_loss(*rewards)
        case "discopop":
            return discopop_loss(*rewards)
