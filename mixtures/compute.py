"""The part of `engine` that says how a training computes on each device, and what it keeps there."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from gristmill.mixtures.section import Fraction, Positive, Section


class Compute(Section):
    """How a training computes on each device: what is compiled, and what is computed twice or moved to save memory.

    Changes no result but by rounding; `activation_checkpointing` without `compile`, and `offload_optimizer`, not even
    by that.
    """

    compile: Literal["off", "block", "model"] = "off"
    """What torch.compile takes as one: nothing, each layer (quick to compile, any number of processes), or all layers
    with what lies around them (fuses more; one process). Needs a C++ compiler on a CPU."""
    activation_checkpointing: Literal["off", "full", "selective", "budget"] = "off"
    """Which activations are forgotten in the forward pass and computed again in the backward pass (Chen et al. 2016).
    `full`: all inside a layer. `selective`: all but attention and every second matrix product (torchtitan). `budget`:
    as many as it takes to stay within `memory_budget`, chosen by the compiler; needs `compile`."""
    checkpoint_every_block: Positive = 1
    """`full`, `selective`: only every so-many-th layer forgets."""
    memory_budget: Fraction = 0.9
    """`budget`: share of the activations' memory that may be kept (OLMo-core's guide: 0.9)."""

    offload_optimizer: bool = False
    """Keep the optimizer's moments in (page-locked) host memory: each parameter's come to the GPU for its update and go
    back, 16 bytes per parameter and step over PCI Express for AdamW. Adafactor's and adamw8bit's, which are small, stay
    on the GPU. A training goes on from its checkpoints with and without."""

    @model_validator(mode="after")
    def _budget_is_compiled(self) -> Compute:
        if self.activation_checkpointing == "budget" and self.compile == "off":
            raise ValueError("activation_checkpointing: budget is the compiler's work; say compile: block too")
        return self
