from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tokenize.order import Order
from gristmill.train.loop.stream import extend_digest, micro_batches, rows_in_step

rows_per_source = st.lists(st.integers(1, 50), min_size=1, max_size=4)


@settings(deadline=None)
@given(rows_per_source, st.integers(0, 99), st.integers(1, 13), st.integers(0, 40), st.integers(1, 5))
def test_a_batch_is_the_same_rows_for_every_world_size_and_micro_batch(
    counts: list[int], seed: int, batch: int, step: int, micro: int
) -> None:
    rows = rows_in_step(Order(counts, seed), step, batch)
    for world_size in (1, 2, 4):
        shares = [micro_batches(rows, rank, world_size, micro) for rank in range(world_size)]
        read = np.concatenate([part for share in shares for part in share])
        assert sorted(read) == sorted(rows)
        assert len({len(share) for share in shares}) == 1  # collectives must match
        assert max(len(part) for share in shares for part in share) <= micro


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 99), st.integers(2, 13))
def test_an_epoch_reads_every_row_once(counts: list[int], seed: int, batch: int) -> None:
    total = sum(counts)
    order = Order(counts, seed)
    read = np.concatenate([rows_in_step(order, step, batch) for step in range(-(-total // batch))])
    assert sorted(read[:total]) == list(range(total))


def test_the_digest_depends_on_every_row_and_on_the_order() -> None:
    first, second = np.array([1, 2]), np.array([3, 4])
    forward = extend_digest(extend_digest("", first), second)
    assert forward == extend_digest(extend_digest("", first), second)
    assert forward != extend_digest(extend_digest("", second), first)
    assert forward != extend_digest(extend_digest("", first), np.array([4, 3]))
    assert forward != extend_digest(extend_digest("another set", first), second)
