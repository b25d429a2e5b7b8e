"""When falling chosen answers raise an alarm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.mixtures.posttraining import Dpo
from gristmill.train.data.conversation_tokens import Conversation
from gristmill.train.data.pairs import Pair
from gristmill.train.data.preference_rows import PairRows
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import Shape
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


FALLING = [line(1, 0.0, 0.0, 0.0), *(line(step, 0.2, -0.1, 0.8) for step in range(2, 6))]


def test_three_falling_lines_in_a_row_raise_one_alarm_that_says_what_helps() -> None:
    said: list[str] = []
    alarm = DeclineAlarm(said.append)
    for one in FALLING:
        alarm.look(one)
    assert len(said) == 1
    assert "80% of them are less likely" in said[0]
    assert "by 0.100 nats per token" in said[0]
    assert "dpo.sft_weight" in said[0]
    assert decline_of(FALLING) == {"alarm_step": 4, "fell_chosen": 0.8, "fell_rejected": 0.75}


@pytest.mark.parametrize("other", [line(3, -0.1, -0.1, 0.8), line(3, 0.2, 0.1, 0.8), line(3, 0.2, -0.1, 0.5)])
def test_a_line_that_does_not_fall_begins_the_count_anew(other: dict[str, Any]) -> None:
    falling = line(2, 0.2, -0.1, 0.8)
    said: list[str] = []
    alarm = DeclineAlarm(said.append)
    for one in (falling, falling, other, falling, falling):
        alarm.look(one)
    assert said == []
    assert decline_of([falling, falling, other, falling, falling])["alarm_step"] is None


def test_lines_without_pairs_have_no_decline() -> None:
    assert decline_of([{"step": 1, "validation": {}}]) == {
        "alarm_step": None,
        "fell_chosen": None,
        "fell_rejected": None,
    }


def test_a_batch_says_which_answers_fell_and_how_far(
    make_model: Callable[[Shape], Llama], tiny_shape: Shape, make_pair_rows: Callable[..., PairRows]
) -> None:
    """Answers of 2 and 4 tokens; the policy gives the chosen ones 1 nat less and 3 more, the rejected ones 2 less."""

    def said(ids: list[int], scored: int) -> Conversation:
        return Conversation(np.array(ids), np.arange(len(ids)) >= len(ids) - scored, False, "00" * 16)

    example = {"id": "00" * 16, "prompt": [], "chosen": [], "rejected": []}
    rows = make_pair_rows({"set": [Pair(example, said([1, 2, 3, 4], 2), said([1, 2, 5, 6, 7, 8], 4))] * 2}, 24)
    model = make_model(tiny_shape)
    with torch.no_grad():
        ids, targets = rows.read(np.arange(2))
        logps = model(ids, partial(sequence_logps, targets=targets)).view(2, -1).T.numpy()
    reference = logps + np.array([[1.0, 2.0], [-3.0, 2.0]], dtype=np.float32)
    section = Dpo(data=({"path": "x"},), steps=1, beta=0.5)  # type: ignore[arg-type]
    objective = Preferences(rows, [np.arange(2)], reference, section, 0, 1.0, torch.device("cpu"))
    sums = objective.loss(model, objective.prepare(np.array([0, 1])), 0.5).sums
    found = objective.report(sums.tolist(), 2.0)
    assert found["rewards/chosen"] == pytest.approx(0.5 * (-1 + 3) / 2, abs=1e-5)
    assert found["rewards/rejected"] == pytest.approx(-1.0, abs=1e-5)
    assert (found["fell/chosen"], found["fell/rejected"]) == (0.5, 1.0)
    assert found["log_ratio/chosen"] == pytest.approx((-1 / 2 + 3 / 2) / 2, abs=1e-5)
    assert found["log_ratio/rejected"] == pytest.approx(-2 / 4, abs=1e-5)
