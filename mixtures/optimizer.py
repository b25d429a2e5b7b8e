"""The sections `optimizer`, `schedule` and `average`: how the weights move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.section import Fraction, Positive, PositiveFloat, Section

OptimizerKind = Literal["adamw", "lion", "adafactor", "sophia", "adamw8bit", "muon"]
BETAS: dict[str, tuple[float, float]] = {
    "adamw": (0.9, 0.95),  # GPT-3 (Brown et al. 2020, appendix B)
    "adamw8bit": (0.9, 0.95),
    "muon": (0.9, 0.95),  # of the AdamW that moves what is no hidden matrix
    "lion": (0.9, 0.99),  # Chen et al. 2023, algorithm 2
    "sophia": (0.96, 0.99),  # Liu et al. 2023, section 3.1
}
"""What `betas` means where the manifest does not say: each method's own published values for language models."""


SMALL_MOMENTS: tuple[OptimizerKind, ...] = ("adafactor", "adamw8bit")
"""Kinds that keep so little that `engine.compute.offload_optimizer` leaves it on the device."""


class Optimizer(Section):
    """What an update is. Weight decay is decoupled (Loshchilov & Hutter 2019) and on matrices only, for every kind."""

    kind: OptimizerKind = "adamw"
    """`adamw`: fused AdamW. `lion`: the sign of a running mean (Chen et al. 2023); takes a 3 to 10 times smaller
    learning rate and as much larger decay. `adafactor`: second moments by rows and columns (Shazeer & Stern 2018).
    `sophia`: Sophia-G, clipped by a diagonal of the Gauss-Newton matrix (Liu et al. 2023). `adamw8bit`: AdamW with
    moments in 8 bits, through torchao (extra `quant`). `muon`: orthogonalised momentum for matrices of the layers
    (Jordan et al. 2024) at AdamW's scale (Liu et al. 2025), AdamW for embeddings, output and norms."""
    learning_rate: PositiveFloat = 1e-3
    """At the peak of the schedule. Adafactor's is relative: it is multiplied with the root mean square of each
    parameter's weights (with 1e-3 at the least) and is no more than 1 / sqrt(step), so that another kind's rate
    means something else to it (Shazeer & Stern 2018, section 8 and algorithm 4, where it is 1e-2)."""
    betas: tuple[Fraction, Fraction] | None = None
    """Decay of the running means of gradients and of their squares; each kind's published values if absent (adamw,
    adamw8bit, muon: 0.9 and 0.95; lion: 0.9 and 0.99; sophia: 0.96 and 0.99). Adafactor has none."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second mean (adamw, adamw8bit, muon's AdamW)."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled, per step and learning rate."""
    momentum: Fraction = 0.95
    """Muon's (Jordan et al. 2024); the other kinds have `betas`."""
    hessian_every: Positive = 10
    """Sophia's steps between estimates of the curvature (Liu et al. 2023, section 3.1: 10)."""
    gamma: PositiveFloat = 0.05
    """Sophia's scale of the curvature (Liu et al. 2023, section 3.1: 0.05 for Sophia-G)."""
    clip: Literal["global_norm", "adaptive"] = "global_norm"
    """`global_norm`: all gradients together are scaled to `clip_norm`. `adaptive`: each unit's (row's) gradient is
    scaled to `clip_factor` times the norm of its weights (Brock et al. 2021), the output matrix excepted."""
    clip_norm: PositiveFloat = 1.0
    """Largest global norm of the gradients."""
    clip_factor: PositiveFloat = 0.01
    """Largest ratio of a unit's gradient norm to its weight norm (Brock et al. 2021, section 4.1: 0.01)."""

    @model_validator(mode="after")
    def _has_betas_only_where_used(self) -> Optimizer:
        if self.kind == "adafactor" and self.betas is not None:
            raise ValueError("optimizer.betas means nothing to adafactor, whose decay follows the step; remove it")
        return self

    @property
    def decays(self) -> tuple[float, float]:
        """The betas that are used: the manifest's, or the kind's own."""
        return self.betas or BETAS[self.kind]


class TuningOptimizer(Optimizer):
    """What an update of a model that is trained already is."""

    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled, per step and learning rate; none, for a tuning is to stay near its start."""


WARMUP_STEPS = 20
"""Of a training that is long enough: the rate rises over a tenth of shorter ones (the share of alignment-handbook's
recipes, warmup_ratio 0.1)."""


class Schedule(Section):
    """Learning rate as a function of the step."""

    kind: Literal["wsd", "cosine", "linear", "constant", "inverse_sqrt", "polynomial", "one_cycle"] = "wsd"
    """`wsd`: warm-up, stable, decay (Hu et al. 2024); `cosine`, `linear`, `polynomial`: decay from the warm-up on;
    `inverse_sqrt`: falls as the root of the warm-up over the step (Vaswani et al. 2017); `one_cycle`: rises and falls
    along cosines, and ends far below where it began (Smith & Topin 2019); `constant`."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps in which the rate rises linearly from 0; 20 if absent, but no more than a tenth of all steps. One cycle has
    `rise_fraction` instead."""
    warmup_tokens: Positive | None = None
    """Tokens in which it rises, in place of `warmup_steps`; rounded up to whole steps."""
    decay_fraction: Fraction = 0.3
    """Share of the steps in which WSD decays (Hu et al. 2024)."""
    decay: Literal["linear", "cosine", "one_minus_sqrt"] = "linear"
    """How WSD decays; `one_minus_sqrt` falls as 1 - sqrt(progress) (Hägele et al. 2024)."""
    power: PositiveFloat = 2.0
    """Of the polynomial decay; 1 is linear."""
    rise_fraction: Fraction = 0.3
    """Share of the steps in which one cycle rises (PyTorch's OneCycleLR: 0.3)."""
    initial_fraction: Fraction = 0.04
    """Where one cycle begins, as a share of the peak (PyTorch's OneCycleLR: 1/25)."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a share of the peak; the inverse root and `constant` have none."""

    def warmup_of(self, steps: int) -> int:
        """Steps of the warm-up in a training of so many, where it is not given in tokens."""
        return min(WARMUP_STEPS, steps // 10) if self.warmup_steps is None else self.warmup_steps


class Average(Section):
    """A second set of weights, the mean of those along the way; trained with, but not by."""

    kind: Literal["ema", "swa"] = "ema"
    """`ema`: exponential moving average; `swa`: the plain mean since the start (Izmailov et al. 2018)."""
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Of the exponential average, per update (Marin's 32B run: 0.995)."""
    start_fraction: Fraction = 0.0
    """Share of the steps after which averaging starts; until then the average is the weights themselves."""
    every: Positive = 1
    """Steps between contributions."""
