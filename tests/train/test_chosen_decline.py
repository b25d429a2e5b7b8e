"""The alarm about falling likelihoods of chosen answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.train.data.conversation_tokens import Conversation
from gristmill.train.data.pairs import Pair
from gristmill.train.data.preference_rows import PairRows
from gristmill.train.models.model_config import Shape
from gristmill.train.models.transformer import Llama
from gristmill.train.objectives.losses import sequence_logps
from gristmill.train.objectives.preference_objective import Preferences
from gristmill.train.objectives.preference_report import DeclineAlarm, decline_of


def line(step: int, margin: float, ratio: float, fell: float) -> dict[str, Any]:
    return {
        "step": step,
        "rewards/margins": margin,
        "log_ratio/chosen": ratio,
        "fell/chosen": fell,
        "fell/rejected": 0.75,
    }


FALLING = [
    line(1, 0.0, 0.0, 0.0),
    *(line(step, 0.2, -0.1, 0.8) for step in range(2, 6)),
]


def test_three_consecutive_falls_raise_one_alarm_with_the_setting_to_change() -> None:
    messages: list[str] = []
    alarm = DeclineAlarm(messages.append)
    for metrics in FALLING:
        alarm.look(metrics)
    assert len(messages) == 1
    assert "80%" in messages[0]
    assert "0.100 nats" in messages[0]
    assert "dpo.sft_weight" in messages[0]
    assert decline_of(FALLING) == {
        "alarm_step": 4,
        "fell_chosen": 0.8,
        "fell_rejected": 0.75,
    }


@pytest.mark.parametrize(
    "interruption",
    [line(3, -0.1, -0.1, 0.8), line(3, 0.2, 0.1, 0.8), line(3, 0.2, -0.1, 0.5)],
)
def test_line_without_a_fall_restarts_the_count(interruption: dict[str, Any]) -> None:
    falling = line(2, 0.2, -0.1, 0.8)
    messages: list[str] = []
    alarm = DeclineAlarm(messages.append)
    for metrics in (falling, falling, interruption, falling, falling):
        alarm.look(metrics)
    assert messages == []
    assert (
        decline_of([falling, falling, interruption, falling, falling])["alarm_step"]
        is None
    )


def test_metrics_without_pairs_have_no_decline() -> None:
    assert decline_of([{"step": 1, "validation": {}}]) == {
        "alarm_step": None,
        "fell_chosen": None,
        "fell_rejected": None,
    }


def test_report_measures_the_share_and_size_of_falls(
    make_model: Callable[[Shape], Llama],
    tiny_shape: Shape,
    make_pair_rows: Callable[..., PairRows],
) -> None:
    """Answers of 2 and 4 tokens: the policy gives chosen ones 1 nat less and 3 more,
    rejected ones 2 less.
    """

    def answer(ids: list[int], scored: int) -> Conversation:
        return Conversation(
            np.array(ids), np.arange(len(ids)) >= len(ids) - scored, False, "00" * 16
        )

    example = {"id": "00" * 16, "prompt": [], "chosen": [], "rejected": []}
    rows = make_pair_rows(
        {
            "set": [
                Pair(example, answer([1, 2, 3, 4], 2), answer([1, 2, 5, 6, 7, 8], 4))
            ]
            * 2
        },
        24,
    )
    model = make_model(tiny_shape)
    with torch.no_grad():
        ids, targets = rows.read(np.arange(2))
        logps = (
            model(ids, partial(sequence_logps, targets=targets)).view(2, -1).T.numpy()
        )
    reference = logps + np.array([[1.0, 2.0], [-3.0, 2.0]], dtype=np.float32)
    section = Dpo(data=({"path": "x"},), steps=1, beta=0.5)  # type: ignore[arg-type]
    objective = Preferences(
        rows, [np.arange(2)], reference, section, 0, 1.0, torch.device("cpu")
    )
    sums = objective.loss(model, objective.prepare(np.array([0, 1])), 0.5).sums
    report = objective.report(sums.tolist(), 2.0)
    assert report["rewards/chosen"] == pytest.approx(0.5 * (-1 + 3) / 2, abs=1e-5)
    assert report["rewards/rejected"] == pytest.approx(-1.0, abs=1e-5)
    assert (report["fell/chosen"], report["fell/rejected"]) == (0.5, 1.0)
    assert report["log_ratio/chosen"] == pytest.approx((-1 / 2 + 3 / 2) / 2, abs=1e-5)
    assert report["log_ratio/rejected"] == pytest.approx(-2 / 4, abs=1e-5)
