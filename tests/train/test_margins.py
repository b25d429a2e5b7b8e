"""Margins of pairs and answers after preference optimisation: selection, rewards and
report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.train.objectives.preference_report import (
    measured_again,
    pair_rewards,
    write_margins,
)


def assistant_turn(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def dpo(**options: Any) -> Dpo:
    return Dpo.model_validate(
        {"steps": 1, "data": [{"path": "pairs.jsonl"}], **options}
    )


def test_held_out_examples_and_the_first_ids_are_measured() -> None:
    ids, held_out = (
        ["d", "c", "b", "a", "b"],
        np.array([True, False, False, False, False]),
    )
    assert measured_again(ids, held_out, 2).tolist() == [0, 2, 3]
    assert measured_again(ids, held_out, 0).tolist() == [0]
    assert measured_again(ids, held_out, 100).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({"loss": "sigmoid", "beta": 0.5}, [0.5 * 1.0, 0.5 * -2.0]),
        ({"loss": "simpo", "beta": 2.0}, [2.0 * -3.0 / 3, 2.0 * -6.0 / 2]),
    ],
)
def test_rewards_follow_the_definition_of_the_loss(
    loss: dict[str, Any], expected: list[float]
) -> None:
    rewards = pair_rewards(
        np.array([[-3.0, -6.0]]),
        np.array([[-4.0, -4.0]]),
        np.array([[3, 2]]),
        dpo(**loss),
    )
    assert rewards[0].tolist() == pytest.approx(expected)


def test_report_lists_the_worst_pairs_and_the_errors_of_sets(tmp_path: Path) -> None:
    ids = ["a", "b", "c", "d"]
    rewards = np.array(
        [[1.0, 3.0], [2.0, 1.0], [0.0, 2.0], [5.0, 1.0]], dtype=np.float32
    )
    records = [
        {
            "id": row,
            "prompt": assistant_turn("p" * 400),
            "chosen": assistant_turn(f"yes {row}"),
            "rejected": assistant_turn("no"),
        }
        for row in ids
    ]
    report = write_margins(
        tmp_path / "margins.parquet",
        records,
        ["x", "x", "y", "y"],
        np.array([False, False, False, True]),
        rewards,
    )
    assert [(row["id"], row["margin"]) for row in report["worst"]] == [
        ("a", -2.0),
        ("c", -2.0),
        ("b", 1.0),
        ("d", 4.0),
    ]
    assert report["worst"][0] == {
        "id": "a",
        "set": "x",
        "held_out": False,
        "chosen": 1.0,
        "rejected": 3.0,
        "margin": -2.0,
        "prompt_text": "p" * 300 + "...",
        "chosen_text": "yes a",
        "rejected_text": "no",
    }
    assert {
        part: (accuracy["value"], accuracy["units"])
        for part, accuracy in report["right"].items()
    } == {
        "trained": (pytest.approx(1 / 3), 3),
        "held_out": (1.0, 1),
    }
    trained = report["right"]["trained"]
    assert (trained["low"], trained["high"]) == pytest.approx(
        (0.0615, 0.7923), abs=1e-4
    )
    assert report["right"]["held_out"]["low"] < 0.5
    assert report["sets"] == [
        {"name": "x", "trained": {"measured": 2, "wrong": 0.5, "median": -0.5}},
        {
            "name": "y",
            "held_out": {"measured": 1, "wrong": 0.0, "median": 4.0},
            "trained": {"measured": 1, "wrong": 1.0, "median": -2.0},
        },
    ]
    written = pq.read_table(tmp_path / "margins.parquet").to_pydict()
    assert written["id"] == ids
    assert written["margin"] == [-2.0, 1.0, -2.0, 4.0]
