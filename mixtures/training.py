"""The section `pretrain`, and what all trainings have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gristmill.mixtures.model import Model
from gristmill.mixtures.optimizer import Optimizer, Schedule
from gristmill.mixtures.section import Positive, PositiveFloat, Section


class Training(Section):
    """What the three training stages have in common."""

    steps: Positive
    """Optimizer steps."""
    global_batch_size: Positive = 16
    """Rows (or pairs) per optimizer step, over all ranks and micro-batches."""
    micro_batch_size: Positive = 16
    """Rows (or pairs) per forward pass on one rank at the most."""
    optimizer: Optimizer = Optimizer()
    """AdamW's settings."""
    schedule: Schedule = Schedule()
    """Learning rate as a function of the step."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype; `auto` is bf16 on a GPU and fp32 on a CPU."""
    log_every: Positive = 10
    """Steps between records of loss and speed."""
    spike_sigma: PositiveFloat = 6.0
    """A step whose loss lies so many deviations over the running mean is skipped (OLMo-core: 6)."""
    seed: int | None = None
    """Of initialisation and order; the manifest's if absent."""


class Pretrain(Training):
    """Next-token training on the packed set."""

    model: Model = Model()
    """The decoder that is trained."""
    z_loss: float = Field(default=0.0, ge=0.0)
    """Weight of the squared log of the softmax's normaliser, which keeps logits from drifting (PaLM, Chowdhery et al.
    2022, section 5: 1e-4)."""
    validate_every: Positive = 100
    """Steps between validations."""
