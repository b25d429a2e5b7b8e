from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gristmill.mixtures.schema.pretrain import Average
from gristmill.train.optim.averaging import AveragedWeights

GOOD, BAD = torch.tensor(False), torch.tensor(True)


def average_of(
    values: list[float], bad: tuple[int, ...] = (), **settings: Any
) -> float:
    """Return the average of a weight with these values after steps 1, 2, ..."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(100.0)  # the untrained weight, which no average includes
    average = AveragedWeights(model, Average.model_validate(settings), len(values))
    for step, value in enumerate(values, start=1):
        model.weight.data.fill_(value)
        average.follow(step, BAD if step in bad else GOOD)
    return average.tensors()["weight"].item()


def test_exponential_average_decays_at_its_rate() -> None:
    # 4, then 0.75 * 4 + 0.25 * 8 = 5, then 0.75 * 5 + 0.25 * 1 = 4
    assert average_of([4.0, 8.0, 1.0], kind="ema", decay=0.75) == 4.0


def test_plain_average_is_the_mean_since_the_start() -> None:
    assert average_of(
        [9.0, 9.0, 1.0, 3.0, 8.0], kind="swa", start_fraction=0.4
    ) == pytest.approx(4.0)
    assert (
        average_of([1.0, 90.0, 3.0, 90.0], kind="swa", every=2, start_fraction=0.0)
        == 90.0
    )


def test_skipped_steps_are_not_averaged() -> None:
    assert average_of([2.0, 2.0, 6.0], bad=(2,), kind="swa") == pytest.approx(4.0)
    assert average_of([4.0, 4.0, 8.0], bad=(2,), kind="ema", decay=0.75) == 5.0


def test_average_equals_the_weights_until_averaging_starts() -> None:
    assert average_of([7.0, 5.0], kind="ema", start_fraction=1.0) == 5.0


def test_model_gets_its_weights_back() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    average = AveragedWeights(model, Average(), 9)
    model.weight.data.fill_(3.0)
    with average.in_place():
        assert model.weight.item() == 1.0
    assert model.weight.item() == 3.0
