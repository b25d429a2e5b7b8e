"""The sections `optimizer` and `schedule`: how the weights move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.section import Fraction, PositiveFloat, Section


class Optimizer(Section):
    """AdamW (Loshchilov & Hutter 2019); weight decay on matrices only."""

    learning_rate: PositiveFloat = 1e-3
    """At the peak of the schedule."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the running means of gradients and of their squares."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second mean."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled, per step and learning rate."""
    clip_norm: PositiveFloat = 1.0
    """Largest global norm of the gradients."""


class Schedule(Section):
    """Learning rate as a function of the step."""

    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """`wsd`: warm-up, stable, decay; `cosine`, `linear`: decay from the warm-up on; `constant`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Steps in which the rate rises linearly from 0."""
    decay_fraction: Fraction = 0.3
    """Share of the steps in which WSD decays (Hu et al. 2024)."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a share of the peak."""
