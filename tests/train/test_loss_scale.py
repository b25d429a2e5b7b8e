from __future__ import annotations

import torch
from torch import nn

from gristmill.train.optimizers.loss_scale import GROWTH_STEPS, LossScale

CPU = torch.device("cpu")


def test_overflow_halves_the_scale_and_good_steps_double_it() -> None:
    scale = LossScale(CPU)
    scale.follow(torch.tensor(True))
    assert scale.value.item() == 2.0**15
    for _ in range(GROWTH_STEPS - 1):
        scale.follow(torch.tensor(False))
    assert scale.value.item() == 2.0**15
    scale.follow(torch.tensor(False))
    assert scale.value.item() == 2.0**16
    scale.follow(torch.tensor(False))
    assert scale.value.item() == 2.0**16


def test_scale_equals_that_of_gradscaler() -> None:
    """Compares with torch._amp_update_scale_, which PyTorch's GradScaler calls."""
    overflows = torch.rand(5000, generator=torch.Generator().manual_seed(0)) < 0.001
    scale, peer, tracker = (
        LossScale(CPU),
        torch.tensor(2.0**16),
        torch.tensor(0, dtype=torch.int32),
    )
    for overflow in overflows:
        scale.follow(overflow)
        torch._amp_update_scale_(peer, tracker, overflow.float(), 2.0, 0.5, 2000)
        assert torch.equal(scale.value, peer)


def test_gradients_are_divided_by_the_scale() -> None:
    model, scale = nn.Linear(1, 1), LossScale(CPU)
    (model(torch.ones(1, 1)).sum() * scale.value).backward()
    scale.divide(model)
    assert (model.weight.grad.item(), model.bias.grad.item()) == (1.0, 1.0)
