from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.mixtures.schema.pretrain import Schedule
from gristmill.train.optim.schedules import learning_rate


def rates(steps: int, **settings: object) -> list[float]:
    schedule = Schedule.model_validate(settings)
    return [learning_rate(schedule, 1.0, step, steps) for step in range(1, steps + 1)]


def test_wsd_warms_up_stays_and_decays_linearly() -> None:
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(10, kind="wsd", warmup_steps=2, decay_fraction=0.4) == pytest.approx(
        expected
    )


def test_wsd_decays_to_the_final_fraction() -> None:
    assert rates(
        4, kind="wsd", warmup_steps=0, decay_fraction=0.5, final_fraction=0.2
    ) == pytest.approx([1.0, 1.0, 0.6, 0.2])


def test_cosine_falls_by_half_a_period() -> None:
    # cos(pi k / 4) for k = 1..4 is 0.7071, 0, -0.7071, -1
    assert rates(5, kind="cosine", warmup_steps=1) == pytest.approx(
        [1.0, 0.8535534, 0.5, 0.1464466, 0.0]
    )
    assert rates(5, kind="cosine", warmup_steps=1, final_fraction=0.1)[
        -1
    ] == pytest.approx(0.1)


def test_linear_falls_evenly_after_warmup() -> None:
    assert rates(6, kind="linear", warmup_steps=2) == pytest.approx(
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    )


def test_constant_stays() -> None:
    assert rates(4, kind="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]


def test_schedule_scales_with_the_peak() -> None:
    assert learning_rate(
        Schedule(kind="constant", warmup_steps=4), 8e-4, 1, 10
    ) == pytest.approx(2e-4)


def test_wsd_decays_along_a_cosine_or_square_root() -> None:
    # cosine: 1/2 (1 + cos(pi k/4)); 1 - sqrt(k/4)
    assert rates(
        4, kind="wsd", warmup_steps=0, decay_fraction=1.0, decay="cosine"
    ) == pytest.approx([0.8535534, 0.5, 0.1464466, 0.0])
    assert rates(
        4, kind="wsd", warmup_steps=0, decay_fraction=1.0, decay="one_minus_sqrt"
    ) == pytest.approx([0.5, 0.2928932, 0.1339746, 0.0])


@given(
    st.sampled_from(["wsd", "cosine", "linear", "constant"]),
    st.integers(1, 60),
    st.integers(0, 80),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_schedules_stay_between_zero_and_peak(
    kind: str, steps: int, warmup: int, decay: float, final: float
) -> None:
    schedule_rates = rates(
        steps,
        kind=kind,
        warmup_steps=warmup,
        decay_fraction=decay,
        final_fraction=final,
    )
    assert all(0.0 <= value <= 1.0 + 1e-12 for value in schedule_rates)
    after_warmup = schedule_rates[min(warmup, steps) :]
    assert after_warmup == sorted(after_warmup, reverse=True)


def test_step_outside_the_training_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"step 0\D+1\D+5"):
        learning_rate(Schedule(), 1.0, 0, 5)


@pytest.mark.parametrize(
    ("steps", "warmup"), [(5, 0), (20, 2), (60, 6), (199, 19), (200, 20), (10_000, 20)]
)
def test_default_warmup_is_twenty_steps_or_a_tenth_of_a_short_training(
    steps: int, warmup: int
) -> None:
    schedule_rates = rates(steps, kind="constant")
    assert schedule_rates[:warmup] == pytest.approx(
        [step / warmup for step in range(1, warmup + 1)]
    )
    assert schedule_rates[warmup:] == [1.0] * (steps - warmup)
    assert rates(steps, kind="constant", warmup_steps=steps)[-2:] == pytest.approx(
        [1.0 - 1.0 / steps, 1.0]
    )
