from __future__ import annotations

import math

import torch

from gristmill.train.loop.spikes import (
    empty_window,
    judge,
    remember_loss,
)

CPU = torch.device("cpu")
FINE = torch.tensor(1.0)


def is_bad_step(
    loss: torch.Tensor, norm: torch.Tensor, window: torch.Tensor, sigma: float
) -> bool:
    return bool(judge(loss, norm, window, sigma)[0])


def window_of(losses: list[float]) -> torch.Tensor:
    window = empty_window(CPU, 128)
    for step, loss in enumerate(losses):
        remember_loss(window, torch.tensor(loss), step)
    return window


def test_infinite_loss_or_gradient_is_bad_from_the_first_step() -> None:
    for bad in (math.nan, math.inf):
        assert is_bad_step(torch.tensor(bad), FINE, empty_window(CPU, 128), 6.0)
        assert is_bad_step(FINE, torch.tensor(bad), empty_window(CPU, 128), 6.0)
    assert not is_bad_step(FINE, FINE, empty_window(CPU, 128), 6.0)


def test_spikes_are_detected_after_64_losses() -> None:
    """Losses alternate between 1 and 3: mean 2, deviation sqrt(n / (n - 1)), so 6 sigma
    ends near 8.05.
    """
    losses = [1.0, 3.0] * 32
    assert not is_bad_step(torch.tensor(1000.0), FINE, window_of(losses[:63]), 6.0)
    assert is_bad_step(torch.tensor(8.1), FINE, window_of(losses), 6.0)
    assert not is_bad_step(torch.tensor(8.0), FINE, window_of(losses), 6.0)
    assert not is_bad_step(torch.tensor(-1000.0), FINE, window_of(losses), 6.0)


def test_only_the_last_128_losses_count() -> None:
    window = window_of([1000.0] * 5 + [1.0, 3.0] * 64)
    assert is_bad_step(torch.tensor(9.0), FINE, window, 6.0)


def test_infinite_losses_are_not_remembered() -> None:
    window = window_of([1.0, 3.0] * 32 + [math.inf, math.nan])
    assert is_bad_step(torch.tensor(9.0), FINE, window, 6.0)
    assert int((~window.isnan()).sum()) == 64
