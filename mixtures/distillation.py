"""The key `distill` of `sft`: a larger model's distributions to learn from, beside the labels."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gristmill.mixtures.section import OutsidePath, Positive, PositiveFloat, Section
from gristmill.mixtures.training import Precision

Divergence = Literal["forward", "reverse", "jsd"]
BETA = 0.5


class TeacherKeys(Section):
    """What the stage `teacher` is told of `sft.distill`: all that a teacher's distributions depend on."""

    teacher: Literal["pretrain"] | OutsidePath
    """A model's folder (config.json with its weights, ours or transformers'), whose vocabulary must be the run's own;
    or `pretrain`: the run's own model before the fine-tuning, which then holds it where it was."""
    temperature: PositiveFloat = 1.0
    """What logits of both models are divided by (Hinton et al. 2015, equation 1); the divergence is multiplied with its
    square, so that gradients keep their size (section 2)."""
    top_k: Positive | Literal["all"] = 64
    """How many of the teacher's likeliest ids are kept per trained token, 8 bytes each, with the mass of all others as
    one more outcome: the divergence is then a lower bound of the whole one. `all` keeps the whole distribution."""


class Distill(TeacherKeys):
    """Learn a teacher's distributions on the trained tokens of `sft`, which the stage `teacher` keeps beforehand."""

    kind: Divergence = "forward"
    """`forward`: KL(teacher || student), which covers what the teacher may say; `reverse`: KL(student || teacher),
    which avoids what it would not (Gu et al. 2024); `jsd`: the generalised Jensen-Shannon divergence between them
    (Agarwal et al. 2024, equation 1)."""
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] = BETA
    """For `jsd`: the teacher's share of the mixture that both are compared with (near 0 as `forward`, near 1 as
    `reverse`, but for a factor)."""
    weight: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Of the divergence; the labels' loss has the rest (torchtune's recipes: 0.5)."""

    @model_validator(mode="after")
    def _beta_is_used(self) -> Self:
        if self.beta != BETA and self.kind != "jsd":
            raise ValueError(f"sft.distill.beta means nothing to the divergence {self.kind}; choose jsd, or remove it")
        return self


class Teach(TeacherKeys):
    """The recipe of the stage `teacher`."""

    precision: Precision = "auto"
    """Compute dtype, that of `sft`."""
    micro_batch_size: Positive = 16
    """Rows per forward pass on one rank at the most."""
