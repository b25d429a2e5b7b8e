"""The sections `sft` and `dpo`: what the pre-trained model is taught."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.optimizer import Optimizer
from gristmill.mixtures.section import OutsidePath, Positive, PositiveFloat, Section
from gristmill.mixtures.training import Precision, Training

PreferenceLoss = Literal[
    "sigmoid", "cdpo", "robust", "hinge", "ipo", "ipo_sum", "sigmoid_norm", "simpo", "orpo"]


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


class Reference(Section):
    """What the stage `reference` is told of the section `dpo`: all that log-probabilities of pairs depend on."""

    data: Annotated[tuple[Examples, ...], Field(min_length=1)]
    """Where the pairs are."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """Tokens per row; the mixture's if absent."""
    precision: Precision = "auto"
    """Compute dtype; `auto` is bf16 on a GPU and fp32 on a CPU."""
    micro_batch_size: Positive = 16
    """Pairs per forward pass on one rank at the most."""


class Dpo(Training):
    """Direct preference optimisation (Rafailov et al. 2023) and its relatives."""

    data: Annotated[tuple[Examples, ...], Field(min_length=1)]
    """Where the examples are."""
    loss: PreferenceLoss = "sigmoid"
    """`sigmoid`: DPO; `cdpo`, `robust`: for labels that are wrong with the probability `label_smoothing`; `hinge`:
    SLiC's; `ipo`: over means of tokens, `ipo_sum`: over sums; `sigmoid_norm`: DPO over means of tokens; `simpo`,
    `orpo`: without a reference. The definitions are in train/objectives/preference_losses.py."""
    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference model."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that a pair is the wrong way round; for `cdpo` and `robust`."""
    gamma_ratio: Annotated[float, Field(ge=0.0)] = 0.5
    """SimPO's target margin as a multiple of beta (its authors: 0.3 to 0.8)."""
    odds_weight: PositiveFloat = 0.1
    """ORPO's lambda (its authors: 0.1)."""
    sft_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the chosen answers' loss per token, added to any loss: against falling likelihoods of chosen answers
    (Pang et al. 2024: 1)."""
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

    @model_validator(mode="after")
    def _smoothing_is_used(self) -> Dpo:
        if self.label_smoothing and self.loss not in ("cdpo", "robust"):
            raise ValueError(f"label_smoothing means nothing to the loss {self.loss}; choose cdpo or robust, or remove "
                             "it")
        return self
