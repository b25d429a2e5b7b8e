"""Losses and advantages of reinforcement learning: values computed by hand, and
invariants.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gristmill.train.rl.policy_gradient import (
    group_advantages,
    groups_without_variance,
    kl_estimate,
    kl_loss,
    surrogate_loss,
    teacher_advantages,
    token_weights,
)


def tensor(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_surrogate_is_clipped_only_if_that_lowers_the_objective() -> None:
    """Ratios 0.5, 1, 1.5 give 1, 2, 2.4 (clipped at 1.2) for A = 2 and -1.6 (clipped at
    0.8), -2, -3 for A = -2.
    """
    ratios = tensor(0.5, 1.0, 1.5)
    old = torch.zeros(3, dtype=torch.float64)
    loss, clipped = surrogate_loss(ratios.log(), old, tensor(2.0, 2.0, 2.0), clip=0.2)
    torch.testing.assert_close(loss, -tensor(1.0, 2.0, 2.4))
    assert clipped.tolist() == [False, False, True]
    loss, clipped = surrogate_loss(
        ratios.log(), old, tensor(-2.0, -2.0, -2.0), clip=0.2
    )
    torch.testing.assert_close(loss, tensor(1.6, 2.0, 3.0))
    assert clipped.tolist() == [True, False, False]


def test_clip_high_changes_only_the_upper_bound() -> None:
    ratios = tensor(0.5, 1.5)
    loss, _ = surrogate_loss(
        ratios.log(),
        torch.zeros_like(ratios),
        tensor(1.0, 1.0),
        clip=0.2,
        clip_high=0.28,
    )
    torch.testing.assert_close(loss, -tensor(0.5, 1.28))
    loss, _ = surrogate_loss(
        ratios.log(),
        torch.zeros_like(ratios),
        tensor(-1.0, -1.0),
        clip=0.2,
        clip_high=0.28,
    )
    torch.testing.assert_close(loss, tensor(0.8, 1.5))


def test_ratio_of_an_answer_is_the_geometric_mean_of_its_tokens() -> None:
    """Ratios 2 and 1/2 and an ignored one have the mean 1, 3 and 3 have 3, clipped at
    1.2; each token has a share of the gradient of its answer's ratio.
    """
    logps = tensor([2.0, 0.5, 9.0], [3.0, 3.0, 1.0]).log().requires_grad_(True)
    mask = torch.tensor([[True, True, False]] * 2)
    loss, clipped = surrogate_loss(
        logps, torch.zeros_like(logps), tensor([1.0], [2.0]), clip=0.2, mask=mask
    )
    torch.testing.assert_close(loss.detach(), -tensor([1.0], [2.4]))
    assert clipped.tolist() == [[False], [True]]
    loss.sum().backward()
    assert logps.grad is not None
    torch.testing.assert_close(logps.grad, -tensor([0.5, 0.5, 0.0], [0.0, 0.0, 0.0]))


def test_clipped_token_has_no_gradient_and_on_policy_token_that_of_reinforce() -> None:
    logps = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss, _ = surrogate_loss(logps, tensor(0.0, -1.0), tensor(3.0, 3.0), clip=0.2)
    loss.sum().backward()
    assert logps.grad is not None
    torch.testing.assert_close(logps.grad, tensor(-3.0, 0.0))


def test_kl_estimators_of_two_known_distributions() -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2): KL(p || q) = 3/4 ln 3/2 + 1/4 ln 1/2; k1 and k3
    have it as their mean under p.
    """
    p, q = tensor(0.75, 0.25), tensor(0.5, 0.5)
    truth = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    mean = {
        kind: float((p * kl_estimate(p.log(), q.log(), kind)).sum())  # type: ignore[arg-type]
        for kind in ("k1", "k2", "k3")
    }
    assert mean["k1"] == pytest.approx(truth, abs=1e-12)
    assert mean["k3"] == pytest.approx(truth, abs=1e-12)
    assert mean["k2"] == pytest.approx(
        0.5 * (0.75 * math.log(1.5) ** 2 + 0.25 * math.log(0.5) ** 2), abs=1e-12
    )
    torch.testing.assert_close(
        kl_estimate(tensor(math.log(2.0)), tensor(0.0), "k3"),
        tensor(math.log(2.0) - 0.5),
    )


def test_gradients_of_kl_estimators() -> None:
    """Gradients of mean estimates by the logits, under the distribution of the policy
    with fixed draws.
    """
    logits, reference = tensor(0.3, -0.2, 0.1), tensor(0.2, 0.5, 0.3).log()

    def gradient(of: str, corrected: bool = False) -> Tensor:
        free = logits.clone().requires_grad_(True)
        logps = free.log_softmax(dim=-1)
        drawn = logits.softmax(dim=-1)
        total = (
            (logps.exp() * (logps - reference)).sum()
            if of == "true"
            else (drawn * kl_loss(logps, drawn.log(), reference, of, corrected)).sum()
        )  # type: ignore[arg-type]
        return torch.autograd.grad(total, free)[0]

    torch.testing.assert_close(gradient("k1"), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(gradient("k2"), gradient("true"))
    assert not torch.allclose(gradient("k3"), gradient("true"))
    for kind in ("k1", "k3"):
        torch.testing.assert_close(gradient(kind, corrected=True), gradient("true"))


def test_gradient_of_distillation_is_that_of_the_reverse_kl() -> None:
    """In expectation over the student's own tokens, whatever the baseline; a token that
    was not drawn has no advantage.
    """
    logits, teacher = tensor(0.3, -0.2, 0.1), tensor(0.2, 0.5, 0.3).log()
    free = logits.clone().requires_grad_(True)
    logps = free.log_softmax(dim=-1)
    drawn = logits.log_softmax(dim=-1)
    (truth,) = torch.autograd.grad((logps.exp() * (logps - teacher)).sum(), free)
    everywhere = torch.ones(3, dtype=torch.bool)
    advantages = teacher_advantages(drawn, teacher, everywhere)
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-12)
    losses, _ = surrogate_loss(free.log_softmax(dim=-1), drawn, advantages, 0.2)
    (estimated,) = torch.autograd.grad((drawn.exp() * losses).sum(), free)
    torch.testing.assert_close(estimated, truth)
    mask = torch.tensor([True, False, True])
    assert teacher_advantages(drawn, teacher, mask)[1] == 0.0


def test_token_weights_by_sequence_token_and_constant() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    expected = {
        "sequence": [[0.25] * 4, [1, 0, 0, 0]],
        "token": [[0.4] * 4, [0.4, 0, 0, 0]],
        "constant": [[0.1] * 4, [0.1, 0, 0, 0]],
    }
    for kind, weights in expected.items():
        torch.testing.assert_close(token_weights(mask, kind, 10), torch.tensor(weights))  # type: ignore[arg-type]
    # All divide the sum by the two answers.
    assert float(token_weights(mask, "sequence", 10).sum()) == pytest.approx(2.0)
    assert float(token_weights(mask, "token", 10).sum()) == pytest.approx(2.0)


def test_weights_of_masked_answers_are_zero() -> None:
    for kind in ("sequence", "token", "constant"):
        assert token_weights(torch.zeros(2, 3), kind, 4).eq(0.0).all()  # type: ignore[arg-type]


def test_advantages_within_groups() -> None:
    """Rewards 1, 0, 0, 1 have the mean 0.5 and the deviation sqrt(1/3) = 0.57735."""
    rewards = tensor(1.0, 0.0, 0.0, 1.0, 3.0, 3.0, 3.0, 3.0)
    by_group = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    torch.testing.assert_close(
        group_advantages(rewards, 4, "group"),
        tensor(by_group, -by_group, -by_group, by_group, 0.0, 0.0, 0.0, 0.0),
    )
    torch.testing.assert_close(
        group_advantages(rewards, 4, "none"),
        tensor(0.5, -0.5, -0.5, 0.5, 0.0, 0.0, 0.0, 0.0),
    )
    # Of 1, the others' mean is 1/3; of 0, it is 2/3.
    torch.testing.assert_close(
        group_advantages(rewards, 4, "leave_one_out"),
        tensor(2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0, 0.0, 0.0, 0.0),
    )
    deviation = float(rewards.std())
    torch.testing.assert_close(
        group_advantages(rewards, 4, "batch")[:2],
        tensor(0.5, -0.5) / (deviation + 1e-4),
    )
    assert groups_without_variance(rewards, 4).tolist() == [False] * 4 + [True] * 4


@given(st.lists(st.floats(-5, 5), min_size=6, max_size=6), st.floats(-3, 3))
@settings(deadline=None)
def test_group_advantages_sum_to_zero_and_ignore_shifted_rewards(
    values: list[float], shift: float
) -> None:
    rewards = tensor(*values)
    for scale in ("group", "none"):
        advantages = group_advantages(rewards, 3, scale)  # type: ignore[arg-type]
        assert advantages.view(2, 3).sum(dim=1).abs().max() < 1e-4
        if scale == "none":
            torch.testing.assert_close(
                group_advantages(rewards + shift, 3, scale), advantages
            )
