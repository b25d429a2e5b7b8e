import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.train.data.example_rows import copies, quotas


def test_largest_set_for_its_weight_is_taken_once() -> None:
    assert quotas([100, 400], [1.0, 1.0]) == [400.0, 400.0]
    assert quotas([100, 400], [1.0, 8.0]) == [100.0, 800.0]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.floats(0.0, 5.0),
    st.integers(0, 9),
)
def test_drawn_tokens_differ_from_the_quota_by_half_an_example_at_most(
    lengths: list[int], passes: float, seed: int
) -> None:
    tokens, ids = np.array(lengths), [str(index) for index in range(len(lengths))]
    quota = passes * tokens.sum()
    counts = copies(tokens, ids, quota, seed)
    assert abs(float((counts * tokens).sum()) - quota) <= tokens.max() / 2 + 1e-6
    assert counts.max() - counts.min() <= 1
    reordered = copies(tokens[::-1], ids[::-1], quota, seed)[::-1]
    assert reordered.tolist() == counts.tolist()


def test_another_seed_draws_other_examples() -> None:
    tokens, ids = np.full(50, 3), [str(index) for index in range(50)]
    assert (
        copies(tokens, ids, 75.0, 1).sum() == copies(tokens, ids, 75.0, 2).sum() == 25
    )
    assert (
        copies(tokens, ids, 75.0, 1).tolist() != copies(tokens, ids, 75.0, 2).tolist()
    )
    assert pytest.approx(1.0) == copies(tokens, ids, 150.0, 1).mean()
