"""Prompts that teach come more often: which ones a batch takes, and that a killed training takes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.flows.questions.training_reads import KeptOrder, Reading, TraceError
from gristmill.mixtures.reinforcement import Curriculum, Rl
from gristmill.tokenize.order import Order
from gristmill.train.reinforcement.curriculum import PromptChoice
from gristmill.train.reinforcement.prompts import prompt_plan_of
from tests.train.test_rl import killed_in, metrics, rl_config, shape, start  # noqa: F401 - fixtures


def choice(**settings_: Any) -> PromptChoice:
    return PromptChoice(Curriculum(**settings_), Order([10], 3), 3)


def test_until_something_is_known_prompts_come_in_their_order() -> None:
    one = choice()
    order = Order([10], 3).rows(np.arange(20)).tolist()
    assert [one.choose(4).tolist() for _ in range(5)] == [order[at : at + 4] for at in range(0, 20, 4)]
    assert (int(one.cursor), int(one.passed_over)) == (20, 0)
    assert one.report() == {"curriculum/passed_over": 0.0, "curriculum/asked": 0.0}


def test_what_all_or_none_have_passed_is_passed_over() -> None:
    """Of ten prompts five are asked next: those of the second epoch that are neither too hard nor too easy."""
    one = choice(again=0.0)
    first = one.choose(10).tolist()
    one.learn(first, torch.tensor([0.0, 1.0, 0.5, 0.25, 0.0, 1.0, 0.75, 0.5, 0.5, 0.0]))
    wanted = {first[at] for at in (2, 3, 6, 7, 8)}
    second = Order([10], 3).rows(np.arange(10, 20)).tolist()
    assert one.choose(5).tolist() == [number for number in second if number in wanted]
    last = max(second.index(number) for number in wanted) + 1
    assert (int(one.cursor), int(one.passed_over)) == (10 + last, last - 5)
    assert one.report() == pytest.approx(
        {
            "curriculum/passed_over": last - 5,
            "curriculum/asked": 1.0,
            "curriculum/too_hard": 0.3,
            "curriculum/wanted": 0.5,
            "curriculum/too_easy": 0.2,
        }
    )


def test_a_narrower_band_leaves_out_more() -> None:
    one = choice(between=(0.3, 0.6), again=0.0)
    first = one.choose(10).tolist()
    one.learn(first, torch.tensor([0.0, 1.0, 0.5, 0.25, 0.0, 1.0, 0.75, 0.5, 0.5, 0.3]))
    assert set(one.choose(3).tolist()) == {first[2], first[7], first[8]}


def test_where_too_few_are_wanted_the_first_of_the_others_fill_up() -> None:
    one = choice(again=0.0)
    first = one.choose(10).tolist()
    one.learn(first, torch.tensor([0.5] + [1.0] * 9))
    second = Order([10], 3).rows(np.arange(10, 20)).tolist()
    assert one.choose(4).tolist() == [first[0], *[number for number in second if number != first[0]][:3]]
    assert int(one.cursor) == 20


def test_a_share_of_the_others_is_asked_again() -> None:
    one = PromptChoice(Curriculum(again=0.2), Order([4000], 3), 3)
    one.learn(one.choose(4000).tolist(), torch.ones(4000))
    one.choose(400)
    assert int(one.passed_over) + 400 == pytest.approx(2000, rel=0.15)


@given(st.integers(0, 1000), st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_what_is_chosen_follows_from_its_state_alone(seed: int, count: int) -> None:
    one, other = (PromptChoice(Curriculum(), Order([10], seed), seed) for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        chosen = one.choose(count).tolist()
        one.learn(chosen, torch.randint(0, 3, (count,), generator=generator) / 2)
    for name, value in other.tensors().items():
        value.copy_(one.tensors()[name])
    for _ in range(3):
        assert one.choose(count).tolist() == other.choose(count).tolist()


CURRICULUM = {
    "curriculum": {"between": [0.0, 1.0], "again": 0.05},
    "global_batch_size": 8,
    "steps_per_batch": 2,
    "steps": 14,
    "kl_weight": 0.0,
    "holdout": 0.0,
    "optimizer": {"learning_rate": 0.005},
}


def test_a_training_with_a_curriculum_resumes_with_the_same_prompts_and_knows_them_later(
    run_stage: Any,
    start: dict[str, Path],  # noqa: F811
    rl_config: dict[str, Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**rl_config, **CURRICULUM}
    run_stage("rl", start, config, tmp_path / "whole", checkpoint_every=100)
    lines = metrics(tmp_path / "whole")
    assert any(line["curriculum/passed_over"] > 0 for line in lines)
    assert lines[-1]["curriculum/asked"] == 1.0
    assert lines[0]["pass_rate"] == lines[0]["reward"]  # one reward, 0 or 1
    with killed_in(11, monkeypatch):
        run_stage("rl", start, config, tmp_path / "killed", checkpoint_every=5)
    # Without it the batch behind the last checkpoint is drawn again, for prompts that are chosen again.
    (tmp_path / "killed" / "work" / "answers" / "batch-00000005.parquet").unlink()
    run_stage("rl", start, config, tmp_path / "killed", checkpoint_every=5)
    assert metrics(tmp_path / "killed") == lines
    for name in ("model/model.safetensors", "answers.parquet"):
        assert (tmp_path / "killed" / "data" / name).read_bytes() == (tmp_path / "whole" / "data" / name).read_bytes()
    ids = (tmp_path / "whole" / "data" / "prompts.txt").read_text().split()
    section = Rl.model_validate(config)
    asked = [one["id"] for one in pq.read_table(tmp_path / "whole" / "data" / "answers.parquet").to_pylist()][::4]
    reading = Reading(
        "rl",
        Any,
        section,
        prompt_plan_of(section),  # type: ignore[arg-type]
        KeptOrder(np.array([ids.index(one) for one in asked])),
    )
    assert [ids[row] for row in reading.rows(3)] == asked[4:6]
    for row in range(len(ids)):
        steps = [at // 2 + 1 for at, one in enumerate(asked) if one == ids[row]]
        assert [step for step, rows in reading.steps_that_read(np.array([row])).items() for _ in rows] == steps
    with pytest.raises(TraceError, match="are known once it has run"):
        Reading(
            "rl",
            Any,
            section,
            prompt_plan_of(section),  # type: ignore[arg-type]
            KeptOrder(np.arange(3)),
        ).rows(2)
