"""Curriculum of `rl`: prompts chosen by their pass rates, reproducible after a
resume.
"""

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
from gristmill.mixtures.schema.rl import Curriculum, Rl
from gristmill.tokenize.shuffle import Order
from gristmill.train.rl.curriculum import PromptChoice
from gristmill.train.rl.prompts import prompt_plan_of
from tests.train.test_rl import killed_in, metrics, rl_config, shape, start  # noqa: F401 - fixtures
from tests.train.trained import assert_same_output


def choice(**settings_: Any) -> PromptChoice:
    return PromptChoice(Curriculum(**settings_), Order([10], 3), 3)


def test_unknown_prompts_come_in_order() -> None:
    prompts = choice()
    order = Order([10], 3).rows(np.arange(20)).tolist()
    assert [prompts.choose(4).tolist() for _ in range(5)] == [
        order[start_ : start_ + 4] for start_ in range(0, 20, 4)
    ]
    assert (int(prompts.cursor), int(prompts.passed_over)) == (20, 0)
    assert prompts.report() == {"curriculum/passed_over": 0.0, "curriculum/asked": 0.0}


def test_prompts_that_all_or_no_answers_pass_are_skipped() -> None:
    """The second epoch chooses the five of ten prompts that are neither too hard nor
    too easy.
    """
    prompts = choice(again=0.0)
    first = prompts.choose(10).tolist()
    prompts.learn(
        first, torch.tensor([0.0, 1.0, 0.5, 0.25, 0.0, 1.0, 0.75, 0.5, 0.5, 0.0])
    )
    informative = {first[index] for index in (2, 3, 6, 7, 8)}
    second = Order([10], 3).rows(np.arange(10, 20)).tolist()
    assert prompts.choose(5).tolist() == [
        number for number in second if number in informative
    ]
    last = max(second.index(number) for number in informative) + 1
    assert (int(prompts.cursor), int(prompts.passed_over)) == (10 + last, last - 5)
    assert prompts.report() == pytest.approx(
        {
            "curriculum/passed_over": last - 5,
            "curriculum/asked": 1.0,
            "curriculum/too_hard": 0.3,
            "curriculum/wanted": 0.5,
            "curriculum/too_easy": 0.2,
        }
    )


def test_narrower_band_skips_more_prompts() -> None:
    prompts = choice(between=(0.3, 0.6), again=0.0)
    first = prompts.choose(10).tolist()
    prompts.learn(
        first, torch.tensor([0.0, 1.0, 0.5, 0.25, 0.0, 1.0, 0.75, 0.5, 0.5, 0.3])
    )
    assert set(prompts.choose(3).tolist()) == {first[2], first[7], first[8]}


def test_skipped_prompts_fill_up_a_batch() -> None:
    prompts = choice(again=0.0)
    first = prompts.choose(10).tolist()
    prompts.learn(first, torch.tensor([0.5] + [1.0] * 9))
    second = Order([10], 3).rows(np.arange(10, 20)).tolist()
    assert prompts.choose(4).tolist() == [
        first[0],
        *[number for number in second if number != first[0]][:3],
    ]
    assert int(prompts.cursor) == 20


def test_share_of_skipped_prompts_is_asked_again() -> None:
    prompts = PromptChoice(Curriculum(again=0.2), Order([4000], 3), 3)
    prompts.learn(prompts.choose(4000).tolist(), torch.ones(4000))
    prompts.choose(400)
    assert int(prompts.passed_over) + 400 == pytest.approx(2000, rel=0.15)


@given(st.integers(0, 1000), st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_choice_depends_on_saved_state_only(seed: int, count: int) -> None:
    prompts, restored = (
        PromptChoice(Curriculum(), Order([10], seed), seed) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        chosen = prompts.choose(count).tolist()
        prompts.learn(chosen, torch.randint(0, 3, (count,), generator=generator) / 2)
    for name, value in restored.tensors().items():
        value.copy_(prompts.tensors()[name])
    for _ in range(3):
        assert prompts.choose(count).tolist() == restored.choose(count).tolist()


CURRICULUM = {
    "curriculum": {"between": [0.0, 1.0], "again": 0.05},
    "global_batch_size": 8,
    "steps_per_batch": 2,
    "steps": 14,
    "kl_weight": 0.0,
    "holdout": 0.0,
    "optimizer": {"learning_rate": 0.005},
}


@pytest.mark.slow
def test_resumed_training_asks_the_same_prompts_and_traces_them(
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
    # Without its answers, the batch after the last checkpoint is generated again, for
    # the same prompts.
    (tmp_path / "killed" / "work" / "answers" / "batch-00000005.parquet").unlink()
    run_stage("rl", start, config, tmp_path / "killed", checkpoint_every=5)
    assert metrics(tmp_path / "killed") == lines
    assert_same_output(tmp_path / "killed", tmp_path / "whole", "answers.parquet")
    ids = (tmp_path / "whole" / "data" / "prompts.txt").read_text().split()
    section = Rl.model_validate(config)
    answers = pq.read_table(tmp_path / "whole" / "data" / "answers.parquet")
    asked_ids = answers["id"].to_pylist()[::4]
    reading = Reading(
        "rl",
        Any,
        section,
        prompt_plan_of(section),  # type: ignore[arg-type]
        KeptOrder(np.array([ids.index(prompt_id) for prompt_id in asked_ids])),
    )
    assert [ids[row] for row in reading.rows(3)] == asked_ids[4:6]
    for row in range(len(ids)):
        steps = [
            index // 2 + 1
            for index, prompt_id in enumerate(asked_ids)
            if prompt_id == ids[row]
        ]
        assert [
            step
            for step, rows in reading.steps_that_read(np.array([row])).items()
            for _ in rows
        ] == steps
    with pytest.raises(TraceError, match="rl"):
        Reading(
            "rl",
            Any,
            section,
            prompt_plan_of(section),  # type: ignore[arg-type]
            KeptOrder(np.arange(3)),
        ).rows(2)
