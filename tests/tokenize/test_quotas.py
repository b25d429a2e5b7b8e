"""Shares, limits and whole rows of a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill.mixtures.schema.mix import Mix
from gristmill.tokenize.mixing.quotas import (
    MixError,
    MixRequest,
    Phase,
    Quotas,
    Supply,
    by_size,
    exact,
    plan_phases,
    plan_rows,
    round_table,
)
from gristmill.tokenize.shuffle import Order, sources_of_rows

SOURCE_WEIGHTS = {"web": 0.7, "code": 0.3}
TOKENS = {"web": 8100, "code": 100}


def weights(**section: object) -> list[tuple[float, list[float]]]:
    """Plan the phases, and return (end, shares) of each."""
    phases = plan_phases(
        Mix.model_validate({"tokens": 1000, **section}), SOURCE_WEIGHTS, TOKENS
    )
    return [
        (float(phase.end), [float(share) for share in phase.shares()])
        for phase in phases
    ]


def test_weights_are_exact_decimals() -> None:
    assert exact(0.7) == Fraction(7, 10)
    assert plan_phases(Mix(tokens=1000), SOURCE_WEIGHTS, TOKENS) == [
        Phase(Fraction(1), (Fraction(7, 10), Fraction(3, 10)))
    ]


def test_weights_of_a_phase_override_the_mixture_and_those_the_sources() -> None:
    assert weights() == [(1.0, [0.7, 0.3])]
    assert weights(weights={"web": 1, "code": 3}) == [(1.0, [0.25, 0.75])]
    assert weights(weights={"code": 2}) == [(1.0, [0.0, 1.0])]
    phases = [
        {"end": 0.5},
        {"end": 0.8, "weights": {"web": 1, "code": 1}},
        {"weights": {"code": 1}},
    ]
    assert weights(phases=phases) == [
        (0.5, [0.7, 0.3]),
        (0.8, [0.5, 0.5]),
        (1.0, [0.0, 1.0]),
    ]
    assert weights(weights={"web": 1}, phases=phases)[0] == (0.5, [1.0, 0.0])


def test_shares_by_size_are_powers_of_tokens() -> None:
    """8100 : 100 to the power of a half is 90 : 10."""
    assert weights(weights={"alpha": 0.5}) == [(1.0, [0.9, 0.1])]
    assert weights(weights={"alpha": 1})[0][1] == [8100 / 8200, 100 / 8200]
    assert weights(weights={"alpha": 0})[0][1] == [0.5, 0.5]
    assert weights(phases=[{"end": 0.5, "weights": {"alpha": 0.5}}, {}])[0] == (
        0.5,
        [0.9, 0.1],
    )


sizes = st.lists(st.integers(0, 10**13), min_size=1, max_size=8).filter(any)


@given(sizes)
def test_alpha_1_is_proportional_alpha_0_uniform_and_empty_sources_have_no_share(
    tokens: list[int],
) -> None:
    assert by_size(tokens, 1) == tuple(map(Fraction, tokens))
    assert by_size(tokens, 0) == tuple(Fraction(number > 0) for number in tokens)
    assert all(
        (share == 0) == (number == 0)
        for share, number in zip(by_size(tokens, 0.3), tokens, strict=True)
    )


@given(sizes, st.floats(0, 1), st.floats(0, 1))
def test_lower_alpha_gives_small_sources_more(
    tokens: list[int], first_alpha: float, second_alpha: float
) -> None:
    low, high = (
        Phase(Fraction(1), by_size(tokens, alpha)).shares()
        for alpha in sorted((first_alpha, second_alpha))
    )
    smallest = min(range(len(tokens)), key=lambda k: (tokens[k] == 0, tokens[k]))
    assert low[smallest] >= high[smallest] - Fraction(1, 10**20)
    assert sum(low) == sum(high) == 1


def test_zero_weights_are_rejected() -> None:
    with pytest.raises(MixError, match="weights of all sources are 0"):
        Phase(Fraction(1), (Fraction(0), Fraction(0))).shares()
    with pytest.raises(ValueError, match="every weight is 0, so the mixture is empty"):
        Mix.model_validate({"tokens": 10, "weights": {"web": 0}})


@pytest.mark.parametrize(
    ("phases", "complaint"),
    [
        ([{"end": 0.5}, {"end": 0.9}], "the last"),
        ([{}, {"end": 0.9}], "every phase but the last needs `end`"),
        (
            [{"end": 0.5}, {"end": 0.5}, {}],
            r"the phases end at \[0\.5, 0\.5\] of the training set",
        ),
        ([{"end": 1.0}, {}], r"the phases end at \[1\.0\]"),
        ([{"end": 0.5, "weights": {"alpha": 2}}, {}], "alpha .*2"),
    ],
)
def test_unordered_phases_are_rejected(phases: list[object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mix.model_validate({"tokens": 1000, "phases": phases})


LENGTH = 10


def phases_of(*weights: Sequence[float], ends: Sequence[float] = (1.0,)) -> list[Phase]:
    return [
        Phase(exact(end), tuple(map(exact, line)))
        for end, line in zip(ends, weights, strict=True)
    ]


def plan(
    tokens: int,
    weights: Sequence[float],
    supplies: Mapping[str, Supply],
    redistribute: bool = False,
) -> dict[str, int]:
    """Rows of a mixture of one phase."""
    quotas = plan_rows(
        MixRequest(tokens, LENGTH, phases_of(weights), supplies), redistribute
    )
    return dict(zip(supplies, quotas.per_source(), strict=True))


weight = st.one_of(st.just(0.0), st.floats(0, 100).map(lambda value: round(value, 3)))


@st.composite
def requests(draw: st.DrawFn, limited: bool = True) -> MixRequest:
    """Draw mixtures of up to 4 phases and 5 sources; `limited` adds limits, often
    infeasible.
    """
    sources, number = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    ends = sorted(
        draw(st.sets(st.integers(1, 19), min_size=number - 1, max_size=number - 1))
    )
    lines = draw(
        st.lists(
            st.lists(weight, min_size=sources, max_size=sources).filter(any),
            min_size=number,
            max_size=number,
        )
    )
    phases = phases_of(*lines, ends=[*(end / 20 for end in ends), 1.0])
    supplies = {
        f"s{k}": draw(
            st.builds(
                Supply,
                st.sampled_from([0.5, 1.0, 2.5, 50.0]),
                st.integers(0, 3000).map(lambda lack: 3000 - lack),
            )
            if limited
            else st.just(Supply(1.0, 5000))
        )
        for k in range(sources)
    }
    return MixRequest(draw(st.integers(200, 4000)), LENGTH, phases, supplies)


def planned(request: MixRequest) -> Quotas:
    """Plan with redistribution; discard infeasible examples."""
    try:
        return plan_rows(request, redistribute=True)
    except MixError:
        assume(False)
        raise


@pytest.mark.slow
@given(requests())
def test_quotas_fill_every_phase_and_keep_every_limit(request_: MixRequest) -> None:
    quotas, total = planned(request_), request_.tokens // LENGTH
    borders = [
        0,
        *(int(phase.end * total + Fraction(1, 2)) for phase in request_.phases),
    ]
    assert [sum(line) for line in quotas.rows] == np.diff(borders).tolist()
    for rows, supply in zip(
        quotas.per_source(), request_.supplies.values(), strict=True
    ):
        assert rows * LENGTH <= exact(supply.max_epochs) * supply.pass_tokens


@given(requests(limited=False))
def test_quota_without_redistribution_is_the_rounded_share(
    request_: MixRequest,
) -> None:
    quotas = plan_rows(request_)
    for line, rows, phase in zip(
        quotas.requested, quotas.rows, request_.phases, strict=True
    ):
        assert list(line) == [sum(rows) * share for share in phase.shares()]
        assert all(
            abs(number - share) < 1 for number, share in zip(rows, line, strict=True)
        )
    for rows, requested in zip(
        quotas.per_source(), quotas.requested_per_source(), strict=True
    ):
        assert abs(rows - requested) < 1


@pytest.mark.slow
@given(requests(limited=False))
def test_redistribution_changes_nothing_within_limits(request_: MixRequest) -> None:
    assert plan_rows(request_) == plan_rows(request_, redistribute=True)


@pytest.mark.slow
@given(requests())
def test_unlimited_sources_keep_their_ratio_in_every_phase(
    request_: MixRequest,
) -> None:
    """Any two sources that no limit binds have the ratio of their weights, to within a
    row each.
    """
    quotas = planned(request_)
    free = [
        k
        for k, (rows, maximum) in enumerate(
            zip(quotas.per_source(), request_.most(), strict=True)
        )
        if rows < maximum - 1
    ]
    for phase, rows in zip(request_.phases, quotas.rows, strict=True):
        for first in free:
            for second in free:
                slack = phase.weights[first] + phase.weights[second]
                difference = (
                    rows[first] * phase.weights[second]
                    - rows[second] * phase.weights[first]
                )
                assert abs(difference) < slack or not slack


@pytest.mark.slow
@given(requests(limited=False), st.integers(0, 2**32))
def test_every_prefix_keeps_the_weights_of_its_phase_within_the_bound(
    request_: MixRequest, seed: int
) -> None:
    """The deviation is the bound of `shuffle.py` within the phase, plus less than a row
    of rounding for each phase.
    """
    quotas = plan_rows(request_)
    order = Order.of_phases(quotas.rows, seed)
    sources = sources_of_rows(quotas.rows, order.rows(np.arange(order.total)))
    first, requested_before = 0, np.zeros(len(request_.supplies))
    for number, (rows, requested) in enumerate(
        zip(quotas.rows, quotas.requested, strict=True)
    ):
        size, present = sum(rows), sum(1 for part in rows if part)
        for source, (part, share) in enumerate(zip(rows, requested, strict=True)):
            rows_so_far = np.cumsum(sources == source)[first : first + size]
            expected = (
                requested_before[source] + np.arange(1, size + 1) * float(share) / size
            )
            portion = part / size
            bound = (1 - portion) / 2 + portion * (present - 1) / 2 + (number + 1)
            assert (np.abs(rows_so_far - expected) <= bound + 1e-9).all()
        first, requested_before = (
            first + size,
            requested_before + np.array([float(share) for share in requested]),
        )


@given(
    st.lists(weight, min_size=1, max_size=6).filter(any),
    st.lists(st.integers(0, 400), min_size=6, max_size=6),
    st.integers(1, 300),
)
def test_redistribution_in_one_phase_is_water_filling(
    weights: list[float], caps: list[int], total: int
) -> None:
    """Capped sources lie at or below the level of the others, and all rows are given
    out.
    """
    supplies = {str(k): Supply(1, caps[k] * LENGTH) for k in range(len(weights))}
    weighed = sum(cap for share, cap in zip(weights, caps, strict=False) if share)
    if weighed < total:
        with pytest.raises(MixError, match="left without a source"):
            plan(total * LENGTH, weights, supplies, redistribute=True)
        return
    rows = list(plan(total * LENGTH, weights, supplies, redistribute=True).values())
    assert sum(rows) == total
    levels = [
        (Fraction(number - 1) / exact(share), Fraction(number + 1) / exact(share))
        for number, share, cap in zip(rows, weights, caps, strict=False)
        if share and number < cap
    ]
    for number, share, cap in zip(rows, weights, caps, strict=False):
        assert number <= cap if share else number == 0
        if share and number == cap:
            assert all(number < level[1] * exact(share) + 1 for level in levels)
    for low, _ in levels:
        assert all(low < high for _, high in levels)


def test_rows_of_a_capped_source_go_to_the_others_by_weight() -> None:
    """100 rows by 2 : 1 : 1 are 50, 25, 25; `a` has 20, so that `b` and `c` share 80;
    with 30 for `b`, `c` has 50.
    """
    supplies = {"a": Supply(1, 200), "b": Supply(1, 1000), "c": Supply(1, 1000)}
    assert plan(1000, [2, 1, 1], supplies, redistribute=True) == {
        "a": 20,
        "b": 40,
        "c": 40,
    }
    limited = {**supplies, "b": Supply(0.309, 1000)}
    assert plan(1000, [2, 1, 1], limited, redistribute=True) == {
        "a": 20,
        "b": 30,
        "c": 50,
    }


def test_short_source_is_reduced_in_every_phase_proportionally() -> None:
    """`a` has 25 of the 40 + 10 rows of its shares: half of each; other sources fill
    each phase.
    """
    phases = phases_of([1, 1, 0], [1, 0, 1], ends=(0.8, 1.0))
    supplies = {"a": Supply(1, 250), "b": Supply(1, 1000), "c": Supply(1, 1000)}
    quotas = plan_rows(MixRequest(1000, LENGTH, phases, supplies), redistribute=True)
    assert quotas.rows == ((20, 60, 0), (5, 0, 15))
    assert quotas.requested == ((40, 40, 0), (10, 0, 10))


def test_max_epochs_limits_all_phases_together() -> None:
    phases = phases_of([1.0, 1.0], [0.0, 1.0], ends=(0.5, 1.0))
    supplies = {"a": Supply(1, 1000), "b": Supply(2, 370)}
    request = MixRequest(1000, LENGTH, phases, supplies)
    with pytest.raises(MixError) as error:
        plan_rows(request)
    message = str(error.value)
    assert "b: its share of 2 phases asks for 750 tokens" in message
    assert "370 tokens x max_epochs 2 fill 740, 10 too few" in message
    assert "max_epochs to 2.028" in message
    assert "at most 990 tokens" in message
    assert plan_rows(MixRequest(990, LENGTH, phases, supplies)).per_source() == [25, 74]


def test_phase_that_cannot_be_filled_is_named() -> None:
    phases = phases_of([0, 1], [1, 1], ends=(0.5, 1.0))
    supplies = {"a": Supply(1, 5000), "b": Supply(1, 100)}
    with pytest.raises(MixError, match=r"phase 1 of 2 has 50 rows.* 44 "):
        plan_rows(MixRequest(1000, LENGTH, phases, supplies), redistribute=True)


def test_max_epochs_is_an_exact_limit() -> None:
    supply = {"a": Supply(2.5, 40)}
    assert plan(100, [1], supply) == {"a": 10}
    with pytest.raises(
        MixError,
        match=r"asks for 110 tokens, but 40 tokens x max_epochs 2\.5 fill 100, 10 too few",
    ):
        plan(110, [1], supply)


def test_fixes_advised_for_a_shortfall_work() -> None:
    weights, supplies = (
        [0.5, 0.5, 0],
        {"a": Supply(1, 1000), "b": Supply(1, 10_000), "none": Supply(1, 0)},
    )
    with pytest.raises(MixError) as caught:
        plan(4000, weights, supplies)
    message = str(caught.value)
    assert (
        "a: weight 0.5 asks for 2000 tokens, but 1000 tokens x max_epochs 1 fill "
        "1000, 1000 too few" in message
    )
    assert "raise its max_epochs to 2, or lower its weight to 0.166" in message
    assert "at most 2000 tokens" in message
    plan(4000, weights, {**supplies, "a": Supply(2, 1000)})
    plan(4000, [0.166, 0.5, 0], supplies)
    plan(2000, weights, supplies)
    plan(4000, weights, supplies, redistribute=True)
    with pytest.raises(MixError):
        plan(2020, weights, supplies)


def test_every_short_source_is_named_in_the_error() -> None:
    with pytest.raises(MixError) as caught:
        plan(
            1000,
            [1, 1, 1, 1],
            {
                "a": Supply(1, 10),
                "b": Supply(1, 20),
                "c": Supply(1, 9000),
                "empty": Supply(1, 0),
            },
        )
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["a", "b", "empty"]
    assert "no document" in lines[3]


def test_mixture_or_phase_without_a_row_is_rejected() -> None:
    with pytest.raises(MixError, match=r"mix\.tokens is 9.* 10 tokens"):
        plan(9, [1], {"a": Supply(1, 1000)})
    phases = phases_of([1], [1], ends=(0.96, 1.0))
    with pytest.raises(MixError, match=r"mix\.phases\[1\].* \[10, 0\] of 10 rows"):
        plan_rows(MixRequest(100, LENGTH, phases, {"a": Supply(1, 1000)}))


def largest_remainder(total: int, weights: list[Fraction]) -> list[int]:
    """Round by the method of Hamilton."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [floor(part) for part in exact]
    by_remainder = sorted(
        range(len(parts)), key=lambda number: (parts[number] - exact[number], number)
    )
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return parts


fractions = st.fractions(0, 10, max_denominator=50)
line = st.lists(fractions, min_size=1, max_size=7).filter(any)


@st.composite
def tables(draw: st.DrawFn) -> list[list[Fraction]]:
    """Draw the exact rows of some phases, each with an integral sum."""
    sources = draw(st.integers(1, 6))
    lines = draw(
        st.lists(
            st.lists(fractions, min_size=sources, max_size=sources).filter(any),
            min_size=1,
            max_size=5,
        )
    )
    return [_scaled(parts, draw(st.integers(0, 50))) for parts in lines]


def _scaled(parts: list[Fraction], total: int) -> list[Fraction]:
    return [part * total / sum(parts) for part in parts]


@pytest.mark.slow
@given(tables())
def test_cells_rows_and_columns_are_rounded_to_a_neighbour(
    table: list[list[Fraction]],
) -> None:
    rounded = round_table(table)
    for parts, rounded_parts in zip(table, rounded, strict=True):
        assert sum(rounded_parts) == sum(parts)
        assert all(
            abs(number - part) < 1
            for number, part in zip(rounded_parts, parts, strict=True)
        )
    for exact_column, column in zip(
        zip(*table, strict=True), zip(*rounded, strict=True), strict=True
    ):
        assert floor(sum(exact_column)) <= sum(column) <= ceil(sum(exact_column))


@pytest.mark.slow
@given(st.integers(0, 10**12), line)
def test_single_phase_is_rounded_by_largest_remainders(
    total: int, parts: list[Fraction]
) -> None:
    assert round_table([_scaled(parts, total)]) == [largest_remainder(total, parts)]


def test_phases_with_halves_alternate_the_rounding() -> None:
    """1.5 and 1.5 in both phases: each source sums to 3, and is rounded up once."""
    half = [Fraction(3, 2), Fraction(3, 2)]
    assert round_table([half, half]) == [[2, 1], [1, 2]]


def test_phase_with_a_fractional_row_count_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"1\.5 rows"):
        round_table([[Fraction(3, 2)]])
