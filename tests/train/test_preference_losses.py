"""Losses over pairs, by hand: the chosen answer has 4 tokens and gained 2 nats (-12 to
-10), the rejected one has 6 and lost 3 (-20 to -23), so that delta is 5; beta is 0.1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from gristmill.mixtures.schema.posttraining import (
    LossSettings,
    MarginLoss,
    PolicyDivergence,
    PreferenceLoss,
)
from gristmill.train.objectives.preference_losses import (
    REFERENCE_FREE,
    PairLogps,
    loss_at_start,
    preference_loss,
)

PAIR = PairLogps(*map(torch.tensor, ([-10.0], [-23.0], [-12.0], [-20.0], [4.0], [6.0])))
SIGMOID = LossSettings(beta=0.1)
KINDS: tuple[PreferenceLoss, ...] = get_args(PreferenceLoss)


def settings_of(kind: PreferenceLoss) -> LossSettings:
    """Settings of a loss, with noisy labels where it knows them."""
    smoothing = {"cdpo": 0.1, "robust": 0.1, "exo_pair": 0.1}.get(kind, 0.0)
    return LossSettings(loss=kind, beta=0.1, label_smoothing=smoothing)


def softplus(x: float) -> float:
    """-log sigma(-x)."""
    return math.log1p(math.exp(x))


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("sigmoid", {}, 0.4740769842),  # ln(1 + e^-0.5)
        # 0.9 * 0.4740769842 + 0.1 ln(1 + e^0.5)
        ("cdpo", {"label_smoothing": 0.1}, 0.5240769842),
        ("cdpo", {}, 0.4740769842),
        # (0.9 * 0.4740769842 - 0.1 * 0.9740769842) / 0.8
        ("robust", {"label_smoothing": 0.1}, 0.4115769842),
        ("hinge", {}, 0.5),
        ("ipo", {}, 16.0),  # (2/4 + 3/6 - 5)^2
        ("ipo_sum", {}, 0.0),  # (5 - 5)^2
        ("sigmoid_norm", {}, 0.6443966600),  # ln(1 + e^-0.1)
        ("simpo", {}, 0.6523483184),  # 0.1 (-10/4 + 23/6 - 0.5) = 0.0833333
        # 2.5 + 0.1 ln(1 + e^-x), x the difference of log odds of -2.5 and -23/6
        ("orpo", {}, 2.5220989974),
        ("sigmoid", {"sft_weight": 0.2}, 0.9740769842),  # + 0.2 * 10/4
        ("cpo", {}, softplus(-1.3)),  # 0.1 (-10 + 23)
        ("nca_pair", {}, softplus(-0.2) + softplus(0.2) / 2 + softplus(-0.3) / 2),
        ("bco_pair", {}, softplus(-0.2) + softplus(-0.3)),
        ("sppo_hard", {}, 13.0),  # (2 - 5)^2 + (-3 + 5)^2
        ("apo_zero", {}, 1 - sigma(0.2) + sigma(-0.3)),
        ("apo_down", {}, sigma(0.2) + 1 - sigma(0.5)),
        # KL((0.6224593312, 0.3775406688) || (0.9, 0.1))
        (
            "exo_pair",
            {"label_smoothing": 0.1},
            0.6224593312 * math.log(0.6224593312 / 0.9)
            + 0.3775406688 * math.log(0.3775406688 / 0.1),
        ),
        # s = sigma(0.5 / 0.05), between ln(1 + e^-0.5) and e^-0.5
        (
            "discopop",
            {},
            (1 - sigma(10.0)) * 0.4740769842 + sigma(10.0) * math.exp(-0.5),
        ),
        # Scores of +2 and -3 nats: 1 - e^-2 and 1 - e^3
        (
            "sigmoid",
            {"divergence": "forward_kl"},
            softplus(-0.1 * (math.exp(3) - math.exp(-2))),
        ),
        # ln(2 sigma(2)) and ln(2 sigma(-3))
        (
            "hinge",
            {"divergence": "js"},
            1 - 0.1 * math.log(sigma(2.0) / sigma(-3.0)),
        ),
        # 2 (1 - e^-1) / 4 and 2 (1 - e^1.5) / 6 per token
        (
            "ipo",
            {"divergence": 0.5},
            ((1 - math.exp(-1)) / 2 - (1 - math.exp(1.5)) / 3 - 5) ** 2,
        ),
    ],
)
def test_each_loss_is_derived_by_hand(
    kind: PreferenceLoss, settings: dict[str, Any], expected: float
) -> None:
    losses, _, _ = preference_loss(PAIR, LossSettings(loss=kind, beta=0.1, **settings))
    assert losses.tolist() == [pytest.approx(expected, abs=2e-6)]


def test_rewards_are_scaled_log_ratios_or_log_probabilities_without_a_reference() -> (
    None
):
    expected: dict[PreferenceLoss, tuple[float, float]] = {
        "sigmoid": (0.2, -0.3),
        "simpo": (-0.25, -23 / 60),
        "cpo": (-1.0, -2.3),
    }
    for kind, rewards in expected.items():
        _, *actual = preference_loss(PAIR, settings_of(kind))
        assert [reward.item() for reward in actual] == pytest.approx(list(rewards))


@pytest.mark.parametrize("kind", sorted({*KINDS} - {*REFERENCE_FREE}))
def test_reference_has_the_expected_initial_loss(kind: PreferenceLoss) -> None:
    settings = settings_of(kind)
    expected: dict[PreferenceLoss, float] = {
        "hinge": 1.0,
        "ipo": 25.0,
        "ipo_sum": 25.0,
        "nca_pair": 2 * math.log(2),
        "bco_pair": 2 * math.log(2),
        "sppo_hard": 50.0,
        "apo_zero": 1.0,
        "apo_down": 1.0,
        "exo_pair": -math.log(2) - (math.log(0.9) + math.log(0.1)) / 2,
        "discopop": (1 + math.log(2)) / 2,
    }
    start = expected.get(kind, math.log(2))
    assert loss_at_start(settings) == pytest.approx(start)
    same = replace(PAIR, reference_chosen=PAIR.chosen, reference_rejected=PAIR.rejected)
    losses, chosen, rejected = preference_loss(same, settings)
    assert losses.item() == pytest.approx(start)
    assert chosen.item() == rejected.item() == 0.0


def test_losses_without_a_reference_have_no_initial_value() -> None:
    assert [loss_at_start(settings_of(kind)) for kind in REFERENCE_FREE] == [None] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_prefers_a_larger_margin_with_a_finite_gradient(
    kind: PreferenceLoss,
) -> None:
    chosen = torch.tensor([-10.0, -1e-7, -900.0], requires_grad=True)
    rejected = torch.tensor([-23.0, -900.0, -1e-7], requires_grad=True)
    # The target margin of IPO is 1 / (2 beta) = 5, so that it grows from 0.
    reference = (
        torch.tensor([-10.0, -1e-7, -900.0]),
        torch.tensor([-23.0, -900.0, -1e-7]),
    )
    tokens = torch.tensor([4.0, 4.0, 4.0])
    losses, *_ = preference_loss(
        PairLogps(chosen, rejected, *reference, tokens, tokens), settings_of(kind)
    )
    losses.sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.isfinite().all()
    assert rejected.grad.isfinite().all()
    match kind:
        case "discopop":
            # Not monotonic: it rises with the margin around 0.
            assert chosen.grad[0] > 0 > rejected.grad[0]
        case "apo_down":
            # Both terms pull the chosen answer equally at a margin of 0.
            assert chosen.grad[0] == 0 < rejected.grad[0]
        case _:
            assert chosen.grad[0] < 0 < rejected.grad[0]


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js", 0.5])
@pytest.mark.parametrize("kind", get_args(MarginLoss))
def test_losses_of_a_margin_are_finite_for_log_ratios_of_hundreds_of_nats(
    kind: PreferenceLoss, divergence: PolicyDivergence
) -> None:
    chosen = torch.tensor([900.0, -900.0], requires_grad=True)
    rejected = torch.tensor([-900.0, 900.0])
    zeros, tokens = torch.zeros(2), torch.full((2,), 4.0)
    settings = settings_of(kind).model_copy(update={"divergence": divergence})
    losses, *_ = preference_loss(
        PairLogps(chosen, rejected, zeros, zeros, tokens, tokens), settings
    )
    losses.sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "sigmoid", "label_smoothing": 0.1},
        {"loss": "exo_pair"},
        {"loss": "apo_zero", "divergence": "js"},
        {"loss": "simpo", "divergence": 0.5},
        {"divergence": 1.0},
    ],
)
def test_settings_without_effect_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LossSettings.model_validate(settings)


def test_gradient_equals_that_of_the_paper() -> None:
    """Rafailov et al. 2023, section 4: -beta sigma(rejected reward - chosen reward) for
    the chosen answer; with rewards 0.2 and -0.3, -0.1 sigma(-0.5) = -0.1 *
    0.3775406688.
    """
    chosen = torch.tensor([-10.0], requires_grad=True)
    preference_loss(replace(PAIR, chosen=chosen), SIGMOID)[0].backward()
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.03775406688, abs=1e-8)


def test_extreme_margin_is_finite() -> None:
    extreme = PairLogps(*map(torch.tensor, ([-1e6], [0.0], [0.0], [0.0], [1.0], [1.0])))
    assert preference_loss(extreme, LossSettings(beta=1.0))[0].item() == pytest.approx(
        1e6
    )


def test_odds_near_certainty_are_precise() -> None:
    """log odds of a mean of -1e-6 are -1e-6 - log(1 - e^-1e-6) = 13.81551."""
    near = PairLogps(
        *map(torch.tensor, ([-1e-6], [-math.log(2.0)], [0.0], [0.0], [1.0], [1.0]))
    )
    settings = LossSettings(loss="orpo", beta=0.1, odds_weight=1.0)
    loss = preference_loss(near, settings)[0].item()
    assert loss == pytest.approx(1e-6 + math.log1p(math.exp(-13.815510)), rel=1e-3)
