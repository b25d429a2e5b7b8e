from __future__ import annotations

import pytest
import torch
from torch import nn

from gristmill.train.optimizers.noise_scale import (
    NoiseScale,
    PartNorms,
    noise_and_signal,
)

CPU = torch.device("cpu")


def test_two_batch_sizes_give_noise_and_signal() -> None:
    """|G|^2 = 4 and tr Sigma = 12 give mean squares of 4 + 12/2 = 10 over 2 rows, and 4
    + 12/6 = 6 over 6 rows.
    """
    estimate = noise_and_signal(
        torch.tensor([9.0, 10.0, 11.0]), [2, 2, 2], torch.tensor(6.0)
    )
    assert estimate.tolist() == pytest.approx([12.0, 4.0])


def test_uneven_micro_batches_are_weighted_by_their_mean_inverse() -> None:
    estimate = noise_and_signal(
        torch.tensor([4 + 12 / 4, 4 + 12 / 2]), [4, 2], torch.tensor(6.0)
    )
    assert estimate.tolist() == pytest.approx([12.0, 4.0])


def test_estimate_recovers_the_noise_of_known_gradients() -> None:
    """Per-row gradients are normal around (2, 0) with deviation 3 in 8 dimensions: tr
    Sigma = 72, |G|^2 = 4.
    """
    generator = torch.Generator().manual_seed(0)
    model, scale = nn.Linear(8, 1, bias=False), NoiseScale(CPU)
    for _ in range(400):
        rows = torch.randn(16, 8, generator=generator) * 3.0
        rows[:, 0] += 2.0
        model.weight.grad = torch.zeros(1, 8)
        parts = PartNorms(model)
        for part in rows.split(4):
            model.weight.grad += part.sum(dim=0) / 16
            parts.take(share=0.25, rows=4)
        scale.follow(parts.estimate(), torch.tensor(False))
    report = scale.report()
    assert report["gradient_noise"] == pytest.approx(72, rel=0.15)
    assert report["gradient_signal"] == pytest.approx(4, rel=0.35)
    assert report["gradient_noise_scale"] == pytest.approx(
        report["gradient_noise"] / report["gradient_signal"]
    )


def test_bad_steps_are_not_measured() -> None:
    scale = NoiseScale(CPU)
    scale.follow(
        torch.tensor([float("nan"), 1.0], dtype=torch.float64), torch.tensor(True)
    )
    assert scale.report() == {}
    scale.follow(torch.tensor([6.0, 2.0], dtype=torch.float64), torch.tensor(False))
    assert scale.report() == pytest.approx(
        {"gradient_noise_scale": 3.0, "gradient_noise": 6.0, "gradient_signal": 2.0}
    )
