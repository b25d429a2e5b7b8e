from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.shuffle import Order
from gristmill.train.loop.batch_plan import (
    PlanError,
    RowPlan,
    extend_digest,
    micro_batches,
    plan_of,
)

rows_per_source = st.lists(st.integers(1, 50), min_size=1, max_size=4)
LENGTH = 12


def constant(batch: int) -> RowPlan:
    return RowPlan(((0, 0, batch),))


def pretrain(**keys: Any) -> Pretrain:
    return Pretrain.model_validate({"steps": 100, "global_batch_size": 4, **keys})


@st.composite
def ramps(draw: st.DrawFn) -> Pretrain:
    """Ramps of up to three stages each, with ends in steps or tokens."""
    by_tokens = draw(st.booleans())
    ends = draw(st.lists(st.integers(1, 40), unique=True, max_size=3).map(sorted))
    batches = [
        {"until_tokens": end * 40 * LENGTH} if by_tokens else {"until_step": end}
        for end in ends
    ]
    lengths = draw(st.lists(st.integers(1, 40), unique=True, max_size=3).map(sorted))
    return pretrain(
        global_batch_size=draw(st.integers(1, 30)),
        batch_ramp=[
            {**end, "global_batch_size": draw(st.integers(1, 30))} for end in batches
        ],
        length_ramp=[
            {
                "until_step": end,
                "sequence_length": draw(st.sampled_from([1, 2, 3, 4, 6])),
            }
            for end in lengths
        ],
    )


@settings(deadline=None)
@given(
    rows_per_source,
    st.integers(0, 99),
    st.integers(1, 13),
    st.integers(0, 40),
    st.integers(1, 5),
)
def test_batch_has_the_same_rows_for_every_world_size_and_micro_batch(
    counts: list[int], seed: int, batch: int, step: int, micro: int
) -> None:
    rows = constant(batch).rows(Order(counts, seed), step)
    for world_size in (1, 2, 4):
        shares = [
            micro_batches(rows, rank, world_size, micro) for rank in range(world_size)
        ]
        read = np.concatenate([part for share in shares for part in share])
        assert sorted(read) == sorted(rows)
        assert len({len(share) for share in shares}) == 1  # collectives must match
        assert max(len(part) for share in shares for part in share) <= micro


def test_digest_depends_on_every_row_and_their_order() -> None:
    head, tail = np.array([1, 2]), np.array([3, 4])
    forward = extend_digest(extend_digest("", head), tail)
    assert forward == extend_digest(extend_digest("", head), tail)
    assert forward != extend_digest(extend_digest("", tail), head)
    assert forward != extend_digest(extend_digest("", head), np.array([4, 3]))
    assert forward != extend_digest(extend_digest("another set", head), tail)


@settings(deadline=None, max_examples=60)
@given(rows_per_source, st.integers(0, 99), ramps(), st.integers(0, 60))
def test_ramps_read_every_row_once_in_the_order_without_a_ramp(
    counts: list[int], seed: int, section: Pretrain, resumed: int
) -> None:
    order, plan = Order(counts, seed), plan_of(section, LENGTH)
    steps = next(
        step for step in range(10_000) if plan.positions(step)[0] >= order.total
    )
    read = np.concatenate([plan.rows(order, step) for step in range(steps)])
    assert read.tolist() == order.rows(np.arange(len(read))).tolist()
    assert sorted(read[: order.total].tolist()) == list(range(order.total))
    # The rows of a step depend on its number alone, so a resumed training has no gap.
    start, row_count = plan.positions(resumed)
    assert (
        plan_of(section, LENGTH).rows(order, resumed).tolist()
        == order.rows(np.arange(start, start + row_count)).tolist()
    )
    assert plan.positions(resumed + 1)[0] == start + row_count
    assert (
        plan.steps_of(np.arange(start, start + row_count)).tolist()
        == [resumed] * row_count
    )


def test_equivalent_ramps_by_steps_and_by_tokens_give_one_plan() -> None:
    by_steps = pretrain(
        batch_ramp=[
            {"until_step": 10, "global_batch_size": 2},
            {"until_step": 15, "global_batch_size": 3},
        ]
    )
    by_tokens = pretrain(
        batch_ramp=[
            {"until_tokens": 20 * LENGTH, "global_batch_size": 2},
            {"until_tokens": 35 * LENGTH - 7, "global_batch_size": 3},
        ]
    )
    assert plan_of(by_steps, LENGTH) == plan_of(by_tokens, LENGTH)
    assert plan_of(by_steps, LENGTH).batches == ((0, 0, 2), (10, 20, 3), (15, 35, 4))
    assert plan_of(by_steps, LENGTH).positions(14) == (32, 3)
    assert plan_of(by_steps, LENGTH).positions(17) == (43, 4)


def test_length_ramp_cuts_rows_until_its_last_step() -> None:
    section = pretrain(
        length_ramp=[
            {"until_step": 2, "sequence_length": 3},
            {"until_step": 5, "sequence_length": 6},
        ]
    )
    assert [plan_of(section, LENGTH).cuts_in_step(step) for step in range(7)] == [
        4,
        4,
        2,
        2,
        2,
        1,
        1,
    ]


def test_invalid_ramps_are_rejected() -> None:
    with pytest.raises(PlanError, match=r"sequence_length 5\D+12 tokens"):
        plan_of(pretrain(length_ramp=[{"until_step": 2, "sequence_length": 5}]), LENGTH)
    mixed = [
        {"until_step": 9, "global_batch_size": 2},
        {"until_tokens": 10 * LENGTH, "global_batch_size": 4},
    ]
    with pytest.raises(PlanError, match=r"stage 2.* step 10"):
        plan_of(pretrain(batch_ramp=mixed), LENGTH)
    with pytest.raises(ValueError, match=r"until_step .*\[9, 9\]"):
        pretrain(
            length_ramp=[
                {"until_step": 9, "sequence_length": 3},
                {"until_step": 9, "sequence_length": 6},
            ]
        )
    with pytest.raises(ValueError, match=r"until_step|until_tokens"):
        pretrain(batch_ramp=[{"global_batch_size": 3}])
