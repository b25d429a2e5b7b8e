"""The sections `sft` and `dpo`: what the pre-trained model is taught."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from gristmill.mixtures.optimizer import Optimizer
from gristmill.mixtures.section import OutsidePath, Positive, PositiveFloat, Section
from gristmill.mixtures.training import Training


class Examples(Section):
    """One set of instructions or preferences."""

    path: OutsidePath
    """A JSONL file or glob, or `python-docs://`."""
    limit: Positive | None = None
    """Read at most this many examples."""


class Sft(Training):
    """Supervised fine-tuning on conversations; loss on the assistant's turns."""

    data: Annotated[tuple[Examples, ...], Field(min_length=1)]
    """Where the examples are."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """The mixture's if absent."""
    optimizer: Optimizer = Optimizer(learning_rate=3e-4, weight_decay=0.0)
    """What an update is."""


class Dpo(Training):
    """Direct preference optimisation (Rafailov et al. 2023)."""

    data: Annotated[tuple[Examples, ...], Field(min_length=1)]
    """Where the examples are."""
    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference model."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """Tokens per row; the mixture's if absent."""
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of pairs, chosen by hash of the prompt, that only measure the reward accuracy."""
    optimizer: Optimizer = Optimizer(learning_rate=5e-5, weight_decay=0.0)
    """What an update is; `sophia` needs labels to draw, which pairs have not."""

    @model_validator(mode="after")
    def _has_no_labels_to_draw(self) -> Dpo:
        if self.optimizer.kind == "sophia":
            raise ValueError("dpo.optimizer.kind cannot be sophia, which estimates curvature from labels that the "
                             "model draws: a loss over pairs has none; choose another kind")
        return self
