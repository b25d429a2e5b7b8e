"""Learning rate as a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gristmill.dataprep.user_functions import blaming, load_own, wrong
from gristmill.mixtures.schema.pretrain import Schedule, ScheduleKind
from gristmill.mixtures.user_code import Own


def learning_rate(schedule: Schedule, peak: float, step: int, steps: int) -> float:
    """Learning rate of one optimizer step.

    Args:
        schedule: kind, warm-up, decay.
        peak: highest learning rate.
        step: counted from 1; step k of a warm-up of n has k/n of the peak.
        steps: of the whole training; the last one has `final_fraction` of the peak
            (except for `constant`).

    Raises:
        ValueError: the step is outside the training.
        OwnCodeError: a user's schedule fails, or returns something else than a share of
            the peak.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is not one of 1 to {steps}")
    if schedule.own is not None:
        return peak * own_share(schedule.own, step, steps)
    warmup = min(schedule.warmup_of(steps), steps)
    if step <= warmup:
        return peak * step / warmup
    return peak * _after_warmup(schedule, step, steps, warmup)


def schedule(
    kind: ScheduleKind = "wsd", *, steps: int, **settings: Any
) -> Callable[[int], float]:
    """Share of the peak learning rate as a function of the step.

    The function takes the number of finished steps, from 0, as
    `torch.optim.lr_scheduler.LambdaLR` passes them; after the last step it is constant.
    It has no state.

    Args:
        kind: wsd, cosine, linear or constant.
        steps: of the whole training.
        settings: keys of `schedule` in the manifest, such as warmup_steps,
            decay_fraction, final_fraction; all have defaults.

    Raises:
        pydantic.ValidationError: a setting is wrong or unknown.

    >>> share = schedule("wsd", steps=10, warmup_steps=2, decay_fraction=0.4)
    >>> [share(done) for done in range(11)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    section = Schedule.model_validate({"kind": kind, **settings})
    return lambda done: learning_rate(section, 1.0, min(done, steps - 1) + 1, steps)


def own_share(own: Own, step: int, steps: int) -> float:
    """Share of the peak that a user's function returns for a step, counted from 1.

    It is called twice to detect randomness: every rank and every resumed training must
    get the same share.

    Raises:
        OwnCodeError: the function fails, is random, or does not return a finite number
            of at least 0.
    """
    function = load_own(own, "step", "steps")
    with blaming(own.use):
        first, again = function(step, steps), function(step, steps)
    if (
        isinstance(first, bool)
        or not isinstance(first, int | float)
        or not 0 <= first < math.inf
    ):
        raise wrong(
            own,
            f"returned {first!r} in step {step} of {steps}; return this step's share of "
            "optimizer.learning_rate, a finite number of at least 0",
        )
    if again != first:
        raise wrong(
            own,
            f"returned {first!r} and then {again!r} in step {step}; a step must have the "
            "same share on every rank and in a resumed training",
        )
    return float(first)


def _after_warmup(schedule: Schedule, step: int, steps: int, warmup: int) -> float:
    """Share of the peak after the warm-up."""
    progress = (step - warmup) / (steps - warmup)
    match schedule.kind:
        case "constant":
            return 1.0
        case "cosine":
            return _between(schedule.final_fraction, _cosine(progress))
        case "linear":
            return _between(schedule.final_fraction, 1.0 - progress)
        case "wsd":
            # Warm-up, stable, decay (Hu et al. 2024)
            decay = min(steps - warmup, round(schedule.decay_fraction * steps))
            into_decay = step - (steps - decay)
            if into_decay <= 0:
                return 1.0
            decayed = into_decay / decay
            remaining = {
                "linear": 1.0 - decayed,
                "cosine": _cosine(decayed),
                "one_minus_sqrt": 1.0 - math.sqrt(decayed),
            }
            return _between(schedule.final_fraction, remaining[schedule.decay])


def _cosine(progress: float) -> float:
    """Fall from 1 to 0 along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _between(final: float, remaining: float) -> float:
    """Fall from 1 to `final` as `remaining` falls from 1 to 0."""
    return final + (1.0 - final) * remaining
