"""Whose weights hold where, and shares by size."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.mixtures.mix import Mix
from gristmill.tokenize.mixing.shares import MixError, Stage, by_size, exact, plan_stages

OWN = {"web": 0.7, "code": 0.3}
TOKENS = {"web": 8100, "code": 100}


def weights(**section: object) -> list[tuple[float, list[float]]]:
    """(end, shares) of every stage."""
    stages = plan_stages(Mix.model_validate({"tokens": 1000, **section}), OWN, TOKENS)
    return [(float(stage.until), [float(share) for share in stage.shares()]) for stage in stages]


def test_a_weight_is_the_decimal_number_that_was_written() -> None:
    assert exact(0.7) == Fraction(7, 10)
    assert plan_stages(Mix(tokens=1000), OWN, TOKENS) == [Stage(Fraction(1), (Fraction(7, 10), Fraction(3, 10)))]


def test_the_mixture_overrides_the_sources_and_a_stage_overrides_the_mixture() -> None:
    assert weights() == [(1.0, [0.7, 0.3])]
    assert weights(weights={"web": 1, "code": 3}) == [(1.0, [0.25, 0.75])]
    assert weights(weights={"code": 2}) == [(1.0, [0.0, 1.0])]
    stages = [{"until": 0.5}, {"until": 0.8, "weights": {"web": 1, "code": 1}}, {"weights": {"code": 1}}]
    assert weights(stages=stages) == [(0.5, [0.7, 0.3]), (0.8, [0.5, 0.5]), (1.0, [0.0, 1.0])]
    assert weights(weights={"web": 1}, stages=stages)[0] == (0.5, [1.0, 0.0])


def test_shares_by_size_are_tokens_to_the_power_of_alpha() -> None:
    """8100 : 100 to the power of a half is 90 : 10."""
    assert weights(weights={"alpha": 0.5}) == [(1.0, [0.9, 0.1])]
    assert weights(weights={"alpha": 1})[0][1] == [8100 / 8200, 100 / 8200]
    assert weights(weights={"alpha": 0})[0][1] == [0.5, 0.5]
    assert weights(stages=[{"until": 0.5, "weights": {"alpha": 0.5}}, {}])[0] == (0.5, [0.9, 0.1])


sizes = st.lists(st.integers(0, 10**13), min_size=1, max_size=8).filter(any)


@given(sizes)
def test_alpha_1_is_proportional_and_alpha_0_equal_exactly_and_nothing_has_no_share(tokens: list[int]) -> None:
    assert by_size(tokens, 1) == tuple(map(Fraction, tokens))
    assert by_size(tokens, 0) == tuple(Fraction(number > 0) for number in tokens)
    assert all((share == 0) == (number == 0) for share, number in zip(by_size(tokens, 0.3), tokens, strict=True))


@given(sizes, st.floats(0, 1), st.floats(0, 1))
def test_a_lower_alpha_gives_small_sources_more(tokens: list[int], one: float, other: float) -> None:
    low, high = (Stage(Fraction(1), by_size(tokens, alpha)).shares() for alpha in sorted((one, other)))
    smallest = min(range(len(tokens)), key=lambda k: (tokens[k] == 0, tokens[k]))
    assert low[smallest] >= high[smallest] - Fraction(1, 10**20)
    assert sum(low) == sum(high) == 1


def test_no_weight_at_all_is_refused() -> None:
    with pytest.raises(MixError, match="weights of all sources are 0"):
        Stage(Fraction(1), (Fraction(0), Fraction(0))).shares()
    with pytest.raises(ValueError, match="every weight is 0, so the mixture is empty"):
        Mix.model_validate({"tokens": 10, "weights": {"web": 0}})


@pytest.mark.parametrize(("stages", "complaint"), [
    ([{"until": 0.5}, {"until": 0.9}], "the last ends with the set"),
    ([{}, {"until": 0.9}], "every stage but the last needs `until`"),
    ([{"until": 0.5}, {"until": 0.5}, {}], r"the stages end at \[0\.5, 0\.5\] of the training set"),
    ([{"until": 1.0}, {}], r"the stages end at \[1\.0\]"),
    ([{"until": 0.5, "weights": {"alpha": 2}}, {}], "alpha lies between 0 .* and 1 .*, not at 2"),
])
def test_stages_that_do_not_follow_one_another_are_refused(stages: list[object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mix.model_validate({"tokens": 1000, "stages": stages})
