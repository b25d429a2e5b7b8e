"""Mixture of experts: routing, load balancing loss, and reported loads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gristmill.train.models.model_config import Shape
from gristmill.train.models.moe import (
    MixtureOfExperts,
    balancing_loss,
    expert_loads,
    report_loads,
)


@pytest.fixture
def layer(tiny_shape: Shape) -> MixtureOfExperts:
    torch.manual_seed(0)
    experts = MixtureOfExperts(
        replace(tiny_shape, experts=5, experts_per_token=2, load_balancing=0.25)
    )
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts


def by_token(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Apply the experts token by token, as in Jiang et al. 2024, section 2.1."""
    rows = []
    for token in x.flatten(0, 1):
        probabilities = (layer.gate.weight @ token).softmax(0)
        top, chosen = probabilities.topk(2)
        out = torch.zeros_like(token)
        for weight, expert in zip(top / top.sum(), chosen.tolist(), strict=True):
            gate, up = (layer.experts.gate_up_proj[expert] @ token).chunk(2)
            out = out + weight * (layer.experts.down_proj[expert] @ (F.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows).view_as(x)


def test_experts_without_tokens_have_zero_gradients(layer: MixtureOfExperts) -> None:
    """A process whose experts have no token takes part in the backward pass."""
    x = torch.zeros(0, 32, requires_grad=True)
    out = layer.experts(x, torch.zeros(5, dtype=torch.int64))
    assert out.shape == (0, 32)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 32)
    gradients = [weight.grad for weight in layer.experts.parameters()]
    assert [
        None if gradient is None else float(gradient.abs().max())
        for gradient in gradients
    ] == [0.0, 0.0]


def test_every_token_is_routed_to_its_likeliest_experts(
    layer: MixtureOfExperts,
) -> None:
    x = torch.randn(3, 7, 32, requires_grad=True)
    ours, theirs = layer(x), by_token(layer, x)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    upstream = torch.randn_like(ours)
    inputs = [x, *layer.parameters()]
    gradients = (torch.autograd.grad(out, inputs, upstream) for out in (ours, theirs))
    for gradient, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, reference, atol=2e-3, rtol=1e-3)
    assert layer.load is not None
    assert layer.load.sum() == 3 * 7 * 2


def test_balancing_loss_is_derived_by_hand() -> None:
    """Two experts, one per token. Row 1: three of four tokens choose the first, mean
    probabilities (0.7, 0.3): 2 (3/4 0.7 + 1/4 0.3) = 1.2. Row 2 is balanced: 2 (1/2 1/2
    + 1/2 1/2) = 1.
    """
    probabilities = torch.tensor(
        [[[0.9, 0.1], [0.9, 0.1], [0.8, 0.2], [0.2, 0.8]], [[0.5, 0.5]] * 4]
    )
    load = torch.tensor([[3, 1], [2, 2]])
    torch.testing.assert_close(
        balancing_loss(probabilities, load), torch.tensor([1.2, 1.0])
    )


def test_balancing_loss_equals_that_of_transformers() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(1, 11, 5, generator=torch.Generator().manual_seed(1))
    probabilities = logits.softmax(-1)
    load = F.one_hot(probabilities.topk(2).indices, 5).sum(dim=(1, 2))
    expected = load_balancing_loss_func((logits[0],), num_experts=5, top_k=2)
    torch.testing.assert_close(balancing_loss(probabilities, load), expected[None])


def test_balancing_loss_adds_its_gradient_to_any_loss(layer: MixtureOfExperts) -> None:
    x, trained = torch.randn(2, 6, 32), torch.tensor([3.0, 0.5])
    gradient = torch.autograd.grad(layer(x, trained).sum(), layer.gate.weight)[0]
    without = torch.autograd.grad(layer(x).sum(), layer.gate.weight)[0]
    probabilities = layer.gate(x).softmax(dim=-1)
    load = F.one_hot(probabilities.topk(2).indices, 5).sum(dim=(1, 2))
    loss = 0.25 * (balancing_loss(probabilities, load) * trained).sum()
    expected = torch.autograd.grad(loss, layer.gate.weight)[0]
    torch.testing.assert_close(gradient - without, expected, atol=1e-4, rtol=1e-3)


def test_loads_are_reported_relative_to_a_uniform_load(layer: MixtureOfExperts) -> None:
    assert expert_loads(layer) == []
    layer(torch.randn(1, 8, 32))
    (load,) = expert_loads(layer)
    assert load.sum() == 16
    # 40 of 100 tokens at one of four experts are 1.6 times its share.
    assert report_loads([25, 25, 25, 25, 40, 30, 20, 10], 4) == {
        "experts": {"largest_load": 1.6, "smallest_load": 0.4}
    }
    assert report_loads([], 0) == {}
