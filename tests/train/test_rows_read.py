"""Rows read by the steps of a training, under any plan or early end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill.flows.stages.plan import make_plan
from gristmill.mixtures.loader import load_manifest
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.batch_plan import plan_of
from gristmill.train.loop.rows_read import rows_read
from tests.jsonl import write_jsonl

RAMP = [{"until_step": 3, "global_batch_size": 2}]


def rows_by_step(mix: PackedSet, reads: dict[str, Any], steps: int) -> list[list[int]]:
    """Rows of each step, computed plainly."""
    plan = plan_of(Pretrain.model_validate(reads), mix.sequence_length)
    return [plan.rows(mix.order(reads["seed"]), step).tolist() for step in range(steps)]


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=st.integers(1, 30),
    batch=st.integers(1, 9),
    seed=st.integers(0, 9),
    is_ramped=st.booleans(),
    withheld=st.lists(st.integers(0, 79), max_size=4, unique=True),
    skipped_steps=st.integers(0, 5),
)
def test_rows_read_equal_those_of_the_steps(
    mix_folder: Path,
    tmp_path: Path,
    steps: int,
    batch: int,
    seed: int,
    is_ramped: bool,
    withheld: list[int],
    skipped_steps: int,
) -> None:
    mix = PackedSet(mix_folder)
    mix.withheld = np.array(sorted(withheld), dtype=np.int64)
    reads = {
        "steps": steps,
        "global_batch_size": batch,
        "batch_ramp": RAMP if is_ramped else [],
        "seed": seed,
    }
    steps_taken = max(1, steps - skipped_steps)
    write_jsonl(
        tmp_path / "metrics.jsonl", [{"step": step + 1} for step in range(steps_taken)]
    )
    by_step = rows_by_step(mix, reads, steps_taken)
    in_order = list(dict.fromkeys(row for rows in by_step for row in rows))
    read = rows_read(mix, Pretrain.model_validate(reads), tmp_path)
    drawn = read.drawn(1000, 1)
    assert len(set(drawn.tolist())) == len(drawn) == read.count
    assert drawn.tolist() == sorted(in_order)
    assert read.first(read.count + 2).tolist() == [*in_order, *(2 * in_order)[:2]]
    sample = read.drawn(3, seed)
    assert len(sample) == min(3, read.count)
    assert set(sample.tolist()) <= set(drawn.tolist())


def test_rows_read_follow_the_plan_without_training_output(mix_folder: Path) -> None:
    mix = PackedSet(mix_folder)
    reads = {"steps": 4, "global_batch_size": 6, "batch_ramp": [], "seed": 11}
    assert rows_read(mix, Pretrain.model_validate(reads), None).first(24).tolist() == [
        row for rows in rows_by_step(mix, reads, 4) for row in rows
    ]


MANIFEST = """
name: t
seed: 3
sources: {a: {path: "python-docs://"}}
tokenizer: {vocab_size: 400}
mix: {tokens: 2000, sequence_length: 32}
pretrain: {steps: 5, global_batch_size: 2, seed: 9}
sft: {steps: 2, data: [{path: "python-docs://"}], seed: 4}
evaluate: {prompts: [a]}
"""


@pytest.mark.parametrize(
    ("stage", "setting"),
    [
        ("sft_data", "sft.replay=0.1"),
        ("evaluate", "evaluate.contamination={}"),
    ],
)
def test_stages_receive_pretraining_reads_only_if_needed(
    tmp_path: Path, stage: str, setting: str
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(MANIFEST)
    assert "reads" not in make_plan(load_manifest(path))[stage].config
    step = make_plan(load_manifest(path, [setting]))[stage]
    assert (
        step.config["reads"]
        == step.recipe["reads"]
        == {"steps": 5, "global_batch_size": 2, "batch_ramp": [], "seed": 9}
    )


@pytest.mark.slow
def test_replay_depends_on_a_pretraining_that_may_end_early(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(MANIFEST)
    early_stopping = ["pretrain.early_stopping.patience=2"]
    for overrides, is_dependent in (
        ([], False),
        (early_stopping, False),
        (["sft.replay=0.1"], False),
        ([*early_stopping, "sft.replay=0.1"], True),
    ):
        manifest = load_manifest(path, overrides)
        plan = make_plan(manifest)
        assert ("pretrain" in plan["sft_data"].inputs) == is_dependent
        names = list(plan)
        assert (names.index("pretrain") < names.index("sft_data")) == is_dependent
