"""Learning rate as a function of the step: pure, so that resuming needs no state."""

from __future__ import annotations

import math

from gristmill.mixtures.optimizer import Schedule


def learning_rate(schedule: Schedule, peak: float, step: int, steps: int) -> float:
    """The learning rate of one optimizer step.

    Args:
        schedule: kind, warm-up, decay.
        peak: the highest learning rate.
        step: counted from 1; step k of a warm-up of n has k/n of the peak.
        steps: steps of the whole training; the last one has `final_fraction` of the peak (constant excepted).
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is not one of 1 to {steps}")
    warmup = min(schedule.warmup_steps, steps)
    if step <= warmup:
        return peak * step / warmup
    return peak * _after_warmup(schedule, step, steps, warmup)


def _after_warmup(schedule: Schedule, step: int, steps: int, warmup: int) -> float:
    """Share of the peak after the warm-up."""
    final = schedule.final_fraction
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "cosine":
        progress = (step - warmup) / (steps - warmup)
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
    # WSD (Hu et al. 2024) with a linear decay; `linear` is the same with all steps in the decay.
    decay = steps - warmup
    if schedule.kind == "wsd":
        decay = min(decay, round(schedule.decay_fraction * steps))
    into_decay = step - (steps - decay)
    if into_decay <= 0:
        return 1.0
    return 1.0 - (1.0 - final) * into_decay / decay
