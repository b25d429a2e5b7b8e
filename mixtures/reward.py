"""The section `reward`: a model that scores answers, taught by preferences."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from gristmill.mixtures.adapters import Lora
from gristmill.mixtures.optimizer import TuningOptimizer
from gristmill.mixtures.posttraining import PreferencePairs
from gristmill.mixtures.section import PositiveFloat
from gristmill.mixtures.training import Training


class RewardOptimizer(TuningOptimizer):
    """What an update of `reward` is."""

    learning_rate: PositiveFloat = 1e-4
    """At the peak of the schedule (TRL's reward training: 1e-4)."""


class Reward(Training):
    """A reward model (Christiano et al. 2017; Stiennon et al. 2020): the tuned model with one number as its output,
    trained so that of each pair the chosen answer's is the larger (Bradley & Terry 1952). The stage's `model/` is what
    transformers loads with AutoModelForSequenceClassification."""

    data: Annotated[tuple[PreferencePairs, ...], Field(min_length=1)] | None = None
    """Where the pairs are; those of `dpo` if absent, each once whatever the weights of the sets."""
    margin: Annotated[float, Field(ge=0.0)] = 0.0
    """By how much a chosen answer's score should be the larger: subtracted from the difference inside the loss
    (Touvron et al. 2023b, equation 2)."""
    center_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps scores around zero, where the loss itself sees
    differences alone (Eisenstein et al. 2023: 0.01)."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """Most tokens per conversation; the context of the model that begins if absent. A pair with a longer answer is left
    out and counted: an answer without its end is not the one that was judged."""
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of pairs, chosen by hash of the prompt, that only measure the accuracy; those of `dpo` where share and seed
    are the same."""
    measured_pairs: Annotated[int, Field(ge=0)] = 10_000
    """Training pairs that are scored once more after the last step, as every held-out one is: the first by their ids,
    which are hashes. `margins.parquet` has them all, the report those that are ranked wrong by the most."""
    optimizer: RewardOptimizer = RewardOptimizer()
    """What an update is; `sophia` needs labels to draw, which pairs have not."""
    lora: Lora | None = None
    """Train adapters and the scoring row only; the whole model is trained if absent. Adapters are merged into `model/`
    and not kept beside it."""

    @model_validator(mode="after")
    def _has_no_labels_to_draw(self) -> Self:
        if self.optimizer.kind == "sophia":
            raise ValueError("reward.optimizer.kind cannot be sophia, which estimates curvature from labels that the "
                             "model draws: a loss over pairs has none; choose another kind")
        return self
