"""Losses over pairs, by hand: the chosen answer has 4 tokens and gained 2 nats (-12 to
-10), the rejected one has 6 and lost 3 (-20 to -23), so that delta is 5; beta is 0.1.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gristmill.mixtures.schema.posttraining import PreferenceLoss
from gristmill.train.objectives.preference_losses import (
    LOSSES,
    LossSettings,
    PairLogps,
    loss_at_start,
    preference_loss,
)

PAIR = PairLogps(*map(torch.tensor, ([-10.0], [-23.0], [-12.0], [-20.0], [4.0], [6.0])))
SETTINGS = LossSettings(beta=0.1)


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
    ],
)
def test_each_loss_is_derived_by_hand(
    kind: PreferenceLoss, settings: dict[str, float], expected: float
) -> None:
    losses, _, _ = preference_loss(kind, PAIR, replace(SETTINGS, **settings))
    assert losses.tolist() == [pytest.approx(expected, abs=2e-6)]


def test_rewards_are_scaled_log_ratios_or_means_without_a_reference() -> None:
    _, chosen, rejected = preference_loss("sigmoid", PAIR, SETTINGS)
    assert (chosen.item(), rejected.item()) == (pytest.approx(0.2), pytest.approx(-0.3))
    _, chosen, rejected = preference_loss("simpo", PAIR, SETTINGS)
    assert (chosen.item(), rejected.item()) == (
        pytest.approx(-0.25),
        pytest.approx(-23 / 60),
    )


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_reference_has_the_expected_initial_loss(kind: PreferenceLoss) -> None:
    same = replace(PAIR, reference_chosen=PAIR.chosen, reference_rejected=PAIR.rejected)
    losses, chosen, rejected = preference_loss(kind, same, SETTINGS)
    expected = loss_at_start(kind, SETTINGS.beta)
    if expected is None:
        assert kind in ("simpo", "orpo")
        return
    assert losses.item() == pytest.approx(expected)
    assert chosen.item() == rejected.item() == 0.0


@pytest.mark.parametrize("kind", sorted(LOSSES))
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
        kind, PairLogps(chosen, rejected, *reference, tokens, tokens), SETTINGS
    )
    losses.sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.isfinite().all()
    assert rejected.grad.isfinite().all()
    assert chosen.grad[0] < 0 < rejected.grad[0]


def test_gradient_equals_that_of_the_paper() -> None:
    """Rafailov et al. 2023, section 4: -beta sigma(rejected reward - chosen reward) for
    the chosen answer; with rewards 0.2 and -0.3, -0.1 sigma(-0.5) = -0.1 *
    0.3775406688.
    """
    chosen = torch.tensor([-10.0], requires_grad=True)
    preference_loss("sigmoid", replace(PAIR, chosen=chosen), SETTINGS)[0].backward()
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.03775406688, abs=1e-8)


def test_extreme_margin_is_finite() -> None:
    extreme = PairLogps(*map(torch.tensor, ([-1e6], [0.0], [0.0], [0.0], [1.0], [1.0])))
    assert preference_loss("sigmoid", extreme, LossSettings(1.0))[
        0
    ].item() == pytest.approx(1e6)


def test_odds_near_certainty_are_precise() -> None:
    """log odds of a mean of -1e-6 are -1e-6 - log(1 - e^-1e-6) = 13.81551."""
    near = PairLogps(
        *map(torch.tensor, ([-1e-6], [-math.log(2.0)], [0.0], [0.0], [1.0], [1.0]))
    )
    loss = preference_loss("orpo", near, replace(SETTINGS, odds_weight=1.0))[0].item()
    assert loss == pytest.approx(1e-6 + math.log1p(math.exp(-13.815510)), rel=1e-3)
