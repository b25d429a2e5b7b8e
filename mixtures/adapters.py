"""The key `lora` of stages that tune a model: small matrices that are trained in place of the model's own."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gristmill.mixtures.section import Positive, PositiveFloat, Section

LinearLayer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of a decoder's layer, by the names that transformers and PEFT give them."""

RoundedBase = Literal["nf4", "int8"]
"""How many bits a frozen weight has, and which."""


class Lora(Section):
    """Low-rank adaptation (Hu et al. 2022): the model is frozen, and W x becomes W x + scale B A x.

    The stage's model has the adapters merged into its weights; beside it lies `adapter/`, which PEFT loads. A learning
    rate ten times that of a full training is usual (alignment-handbook's recipe for Zephyr: 2e-4 for 2e-5).
    """

    rank: Positive = 16
    """Rows of A and columns of B (alignment-handbook's recipe for Zephyr: 16)."""
    alpha: PositiveFloat = 16.0
    """The scale is alpha / rank (the same recipe: 16)."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that large ranks learn as fast as small ones (Kalajdzievski 2023)."""
    dora: bool = False
    """Train each output's magnitude apart from its direction (Liu et al. 2024, equation 5)."""
    targets: Annotated[tuple[LinearLayer, ...], Field(min_length=1)] | None = None
    """The linear layers that get adapters, in every layer; all that the model has if absent (Dettmers et al. 2023,
    section 4: it takes all of them to match a full fine-tuning)."""
    base: RoundedBase | None = None
    """Hold the adapted layers' frozen weights in fewer bits (QLoRA, Dettmers et al. 2023): `nf4` in 4 (bitsandbytes,
    extra `quant`; 0.52 bytes a weight), `int8` in 8, with a scale per row. Every process then holds all of them. The
    adapters learn what rounding took away along with the task, and the stage's model is the rounded one with them
    merged; a reference is rounded alike. float32 if absent. Not together with `dora` or `engine.compute.compile`."""

    @model_validator(mode="after")
    def _has_rows_to_measure(self) -> Self:
        if self.base is not None and self.dora:
            raise ValueError("lora.dora takes the norms of the frozen weights' rows in every step, which lora.base has "
                             "rounded; remove one of the two")
        return self

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
