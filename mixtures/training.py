"""The section `pretrain`, and what all trainings have in common: loop, optimizer, schedule and averages."""

from __future__ import annotations

import ast
import math
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from gristmill.mixtures.base import Fraction, OutsidePath, Positive, PositiveFloat, Section, Seeded
from gristmill.mixtures.evaluation import Task
from gristmill.mixtures.model import Model, RopeScaling
from gristmill.mixtures.objectives.token_objectives import Objectives, objective_problem
from gristmill.mixtures.scaling.size_rules import AT_ADAMWS_SCALE, MOST_DEPTH, SHAPE_KEYS, SIZE_PATTERN
from gristmill.mixtures.user_code import BuiltInOrOwn, OwnCall, OwnFunction, check_signature, stated_signature

OptimizerKind = Literal["adamw", "lion", "adafactor", "sophia", "adamw8bit", "muon", "normuon", "dion", "ademamix"]
BETAS: dict[str, tuple[float, float]] = {
    "adamw": (0.9, 0.95),  # GPT-3 (Brown et al. 2020, appendix B)
    "adamw8bit": (0.9, 0.95),
    "muon": (0.9, 0.95),  # of the AdamW that moves what is not a hidden matrix
    "normuon": (0.9, 0.95),  # the second also of the rows' second moments (Li et al. 2025, section 4)
    "dion": (0.9, 0.95),
    "ademamix": (0.9, 0.999),  # Pagliardini et al. 2024, section 4.1
    "lion": (0.9, 0.99),  # Chen et al. 2023, algorithm 2
    "sophia": (0.96, 0.99),  # Liu et al. 2023, section 3.1
}
"""What `betas` means where the manifest does not say: each method's own published values for language models."""


SMALL_MOMENTS: tuple[OptimizerKind, ...] = ("adafactor", "adamw8bit")
"""Kinds that keep so little that `engine.compute.offload_optimizer` leaves it on the device, as it does what optimizers
of the user's keep."""


ON_MATRICES: tuple[OptimizerKind, ...] = ("muon", "normuon", "dion")
"""Kinds that move the matrices of the layers, and leave the rest to AdamW."""
MUP_KINDS: tuple[OptimizerKind, ...] = ("adamw", "adamw8bit", "ademamix", "lion", *ON_MATRICES)
"""Kinds whose updates have a size of their own, which muP can scale: `train/optim/mup.py`."""


class Optimizer(BuiltInOrOwn):
    """What an update is. Weight decay is decoupled (Loshchilov & Hutter 2019) and on matrices only, for every kind."""

    takes: ClassVar[tuple[str, ...] | None] = ("params",)
    offers: ClassVar[tuple[str, ...]] = ("lr",)
    added = ("cautious_decay", "rank_fraction", "beta3", "alpha", "rise_steps")

    kind: OptimizerKind = "adamw"
    """`adamw`: fused AdamW. `lion`: the sign of a running mean (Chen et al. 2023); takes a 3 to 10 times smaller
    learning rate and as much larger decay. `adafactor`: second moments by rows and columns (Shazeer & Stern 2018).
    `sophia`: Sophia-G, clipped by a diagonal of the Gauss-Newton matrix (Liu et al. 2023). `adamw8bit`: AdamW with
    moments in 8 bits, through torchao (extra `quant`). `muon`: orthogonalised momentum for matrices of the layers
    (Jordan et al. 2024) at AdamW's scale (Liu et al. 2025), AdamW for embeddings, output and norms. `normuon`:
    likewise, with rows of equal size (Li et al. 2025). `dion`: likewise at low rank (Ahn et al. 2025). `ademamix`:
    AdamW with a second, much slower mean (Pagliardini et al. 2024)."""
    learning_rate: PositiveFloat = 1e-3
    """At the peak of the schedule. Adafactor's is relative: it is multiplied with the root mean square of each
    parameter's weights (with 1e-3 at the least) and is no more than 1 / sqrt(step), so that another kind's rate
    means something else to it (Shazeer & Stern 2018, section 8 and algorithm 4, where it is 1e-2)."""
    betas: tuple[Fraction, Fraction] | None = None
    """Decay of the running means of gradients and of their squares; each kind's published values if absent (adamw,
    adamw8bit, muon, normuon, dion: 0.9 and 0.95; ademamix: 0.9 and 0.999; lion: 0.9 and 0.99; sophia: 0.96 and 0.99).
    Adafactor has none."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second mean (adamw, adamw8bit, muon's AdamW)."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled, per step and learning rate."""
    momentum: Fraction = 0.95
    """Of muon, normuon and dion (Jordan et al. 2024; Li et al. 2025; Ahn et al. 2025); the others have `betas`."""
    cautious_decay: bool = False
    """Muon and NorMuon: let a weight of the layers decay only where that goes the way of its update (Chen et al. 2025,
    "Cautious Weight Decay")."""
    rank_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25
    """Dion's rank, as a share of a matrix's shorter side (Ahn et al. 2025, section 4: 1/4 loses little)."""
    beta3: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9999
    """Decay of AdEMAMix's slow mean, at the end of its rise (Pagliardini et al. 2024, section 4.1: 0.9999)."""
    alpha: Annotated[float, Field(ge=0.0)] = 5.0
    """How much AdEMAMix's slow mean counts, at the end of its rise (Pagliardini et al. 2024, section 3: 4 to 10)."""
    rise_steps: Positive | None = None
    """Steps in which `alpha` and `beta3` rise; all of the training if absent (Pagliardini et al. 2024, section 3)."""
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
    def _is_cautious_only_where_it_can_be(self) -> Self:
        if self.cautious_decay and self.kind not in ("muon", "normuon"):
            raise ValueError(f"optimizer.cautious_decay is for muon and normuon, not for {self.kind}; remove it")
        return self

    @model_validator(mode="after")
    def _has_betas_only_where_used(self) -> Optimizer:
        if self.kind == "adafactor" and self.betas is not None:
            raise ValueError("optimizer.betas means nothing to adafactor, whose decay follows the step; remove it")
        return self

    @model_validator(mode="after")
    def _own_has_its_options(self) -> Self:
        unused = self.unused_beside_own("learning_rate", "clip", "clip_norm", "clip_factor")
        if unused:
            raise ValueError(
                f"optimizer.{unused[0]} means nothing to an optimizer of your own; give it as an option, "
                "under `with`, or remove it"
            )
        if "lr" in getattr(self, "with"):
            raise ValueError(
                "optimizer.with.lr: the learning rate is optimizer.learning_rate, which the schedule "
                "follows; remove it from `with`"
            )
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

ScheduleKind = Literal["wsd", "cosine", "linear", "constant", "inverse_sqrt", "polynomial", "one_cycle"]


class Schedule(BuiltInOrOwn):
    """Learning rate as a function of the step."""

    takes: ClassVar[tuple[str, ...] | None] = ("step", "steps")

    kind: ScheduleKind = "wsd"
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
    """Exponent of the polynomial decay; 1 is linear."""
    rise_fraction: Fraction = 0.3
    """Share of the steps in which one cycle rises (PyTorch's OneCycleLR: 0.3)."""
    initial_fraction: Fraction = 0.04
    """Where one cycle begins, as a share of the peak (PyTorch's OneCycleLR: 1/25)."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a share of the peak; the inverse root and `constant` have none."""

    @model_validator(mode="after")
    def _own_has_its_options(self) -> Self:
        if unused := self.unused_beside_own():
            raise ValueError(
                f"schedule.{unused[0]} means nothing to a schedule of your own; give it as an option, "
                "under `with`, or remove it"
            )
        return self

    def warmup_of(self, steps: int) -> int:
        """Steps of the warm-up in a training of so many, where it is not given in tokens."""
        return min(WARMUP_STEPS, steps // 10) if self.warmup_steps is None else self.warmup_steps


class Average(Section):
    """A second set of weights, the mean of those along the way; trained with, but not by."""

    kind: Literal["ema", "swa"] = "ema"
    """`ema`: exponential moving average; `swa`: the plain mean since the start (Izmailov et al. 2018)."""
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Decay of the exponential average, per update (Marin's 32B run: 0.995)."""
    start_fraction: Fraction = 0.0
    """Share of the steps after which averaging starts; until then the average is the weights themselves."""
    every: Positive = 1
    """Steps between contributions."""


LOOK_EVERY_STEPS = 16
"""Steps after which the loop asks the device at the latest whether any of them was skipped."""


HOW_KEYS = (
    "micro_batch_size",
    "log_every",
    "validate_every",
    "evaluate_every",
    "noise_scale_every",
    "generation_rows",
    "samples_every",
)
"""Keys of a training that say how it computes, or what is measured on the way: they change no weight but by rounding,
so they are in no fingerprint, and a training that is resumed may have others."""


MEASURING_KEYS = ("log_every", "validate_every", "evaluate_every", "noise_scale_every")
"""Those of them that say what callbacks see, and when."""


class Spikes(Section):
    """Which steps are skipped: those whose loss or gradient is NaN or Inf, or whose loss lies far above the last ones.

    A skipped step changes no weight. Its loss-spike report in `autopsies/`, a page and JSON, lists what it had read,
    ordered by loss; `exclude.txt` has the ids of the worst documents, one per line.
    """

    sigma: PositiveFloat | None = 6.0
    """Deviations over the running mean from which on a loss is a spike (OLMo-core: 6); null: only a loss or gradient
    that is NaN or Inf skips a step."""
    window: Annotated[int, Field(ge=4)] = 128
    """Steps in the running mean; spikes are judged once it has half of them (OLMo-core: 128)."""
    rollback_after: Positive | None = None
    """After this many bad steps in a row the training rolls back to a checkpoint from before them, and continues behind
    what it has read: those rows are never read again. Without it there is no rollback."""
    rollback_steps: Positive = 100
    """Steps between the checkpoints to go back to; they are saved beside those of `engine.checkpoint_every`, so that
    results do not depend on the latter."""

    @model_validator(mode="after")
    def _has_a_point_before(self) -> Spikes:
        least = (self.rollback_after or 0) + LOOK_EVERY_STEPS
        if self.rollback_after is not None and self.rollback_steps < least:
            raise ValueError(
                f"spikes.rollback_steps must be at least rollback_after + {LOOK_EVERY_STEPS} = {least}, "
                f"not {self.rollback_steps}: a streak must not outlast the checkpoints before it"
            )
        return self


class EarlyStopping(Section):
    """When a training ends before its last step."""

    patience: Positive
    """Validations in a row without a better loss (per token, over all sources) after which it ends."""
    min_delta: Annotated[float, Field(ge=0.0)] = 0.0
    """How much lower than the best so far a loss must be to count as better, in nats per token."""


CallbackEvent = Literal["after_step", "after_validation", "on_checkpoint"]


class Callback(OwnCall):
    """Code that watches a training, and may scale its learning rate or end it: a function of one event, or a class with
    a method for each event that it wants. It sees metrics, and neither data nor weights. Examples are in
    docs/own-training.md."""

    on: CallbackEvent | None = None
    """Of a function, when it is called: `after_step` if absent. A class says it by its methods."""

    def check_code(self, code: OwnFunction) -> None:
        """See that a function takes metrics, and a class its options; see `OwnPlace.check_code`."""
        signature = stated_signature(code)
        if signature is not None:
            given = () if isinstance(code.definition(), ast.ClassDef) else ("metrics",)
            check_signature(code, signature, given, self.options)


Precision = Literal["auto", "fp32", "bf16", "fp16"]
"""Names of compute dtypes."""


class Training(Seeded):
    """What the three training stages have in common."""

    steps: Positive
    """Optimizer steps."""
    global_batch_size: Positive = 16
    """Rows (or pairs) per optimizer step, over all ranks and micro-batches."""
    micro_batch_size: Positive = 16
    """Rows (or pairs) per forward pass on one rank at the most. It changes the result by no more than rounding: a
    training that ran out of memory resumes with a smaller one."""
    optimizer: Optimizer = Optimizer()
    """What an update is."""
    schedule: Schedule = Schedule()
    """Learning rate as a function of the step."""
    average: Average | None = None
    """A running mean of the weights: validated beside them, saved as `model-average`, exported where
    `export.weights` is `average`. None is kept if absent."""
    precision: Precision = "auto"
    """Compute dtype; `auto` is bf16 on a GPU and fp32 on a CPU; `fp16` scales the loss dynamically."""
    log_every: Positive = 10
    """Steps between records of loss and speed."""
    spikes: Spikes = Spikes()
    """Which steps are skipped, and when the training goes back."""
    noise_scale_every: Positive | None = None
    """Steps between measurements of the gradient noise scale (McCandlish et al. 2018), the batch in rows from which
    on a larger one pays less. It takes a batch of several micro-batches, whose gradients are then reduced one by one;
    nothing is measured if absent."""
    seed: int | None = None
    """Seed of initialisation and order; the manifest's if absent."""
    continue_from: OutsidePath | None = None
    """A checkpoint of another training (its folder `step-...`) to continue from, with its weights, optimizer and step:
    to make a training longer, to change its schedule on the way, or to continue with a set from which documents were
    taken that it has not read yet (`mix.exclude`, `gristmill takedown`). It is an error unless that training began with
    the same model and has read exactly what the first steps of this one would."""

    callbacks: Annotated[tuple[Callback, ...], Field(exclude_if=lambda value: not value)] = ()
    """Code of your own that watches the training, and may end it before its last step."""

    @property
    def width_factor(self) -> float:
        """The width over muP's base width; 1 without muP."""
        return 1.0

    @property
    def how(self) -> dict[str, Any]:
        """The keys of HOW_KEYS that this training has, with their defaults.

        Measurements are more than that where they may end the training.
        """
        stopping = ("validate_every",) if getattr(self, "early_stopping", None) is not None else ()
        deciding = MEASURING_KEYS if self.callbacks else stopping
        return {
            key: field.default
            for key, field in type(self).model_fields.items()
            if key in HOW_KEYS and key not in deciding
        }


def _steps_or_epochs(schema: dict[str, Any]) -> None:
    """Tell editors that one of the two is needed."""
    schema["anyOf"] = [{"required": [name]} for name in ("steps", "epochs")]


class TrainingInEpochs(Training):
    """A training of a model that exists, on examples: its length is given in steps or in epochs."""

    added: ClassVar[tuple[str, ...]] = ("epochs",)
    model_config = ConfigDict(json_schema_extra=_steps_or_epochs)

    steps: Positive = 0
    """Optimizer steps; they follow from `epochs` if absent."""
    epochs: PositiveFloat | None = None
    """How often all examples that are trained on are read, in place of `steps`; the last step of the last epoch is
    whole."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if bool(self.steps) == (self.epochs is not None):
            raise ValueError("give either steps or epochs")
        return self

    def in_steps(self, rows: int) -> Self:
        """The same training with its length in steps.

        Args:
            rows: that an epoch reads.
        """
        if self.epochs is None:
            return self
        return self.model_copy(update={"steps": self.steps_of_epochs(self.epochs, rows), "epochs": None})

    def steps_of_epochs(self, epochs: float, rows: int) -> int:
        """Steps that read so many rows that often."""
        return math.ceil(epochs * rows / self.global_batch_size)


class BatchStage(Section):
    """The size of a batch up to a step, or until a number of tokens has been read; exactly one of the two."""

    until_step: Positive | None = None
    """The last step, counted from 1, of this size."""
    until_tokens: Positive | None = None
    """This size holds for the steps that begin before this many tokens have been read."""
    global_batch_size: Positive
    """Rows per optimizer step."""

    @model_validator(mode="after")
    def _one_end(self) -> BatchStage:
        if (self.until_step is None) == (self.until_tokens is None):
            raise ValueError("an entry of batch_ramp ends at `until_step` or at `until_tokens`: give one of the two")
        return self


class LengthStage(Section):
    """The length of rows up to a step."""

    until_step: Positive
    """The last step, counted from 1, of this length."""
    sequence_length: Positive
    """Tokens per row; divides the packed set's."""


class TrainingPhase(Section):
    """What a phase of the mixture (`mix.phases`) has besides its weights."""

    added = ("rope_theta", "rope_scaling")

    learning_rate_scale: Annotated[float, Field(ge=0.0)] = 1.0
    """What the schedule's learning rate is multiplied with in this phase."""
    sequence_length: Positive | None = None
    """Tokens per row in this phase; divides the packed set's, which holds if absent. Rows are cut into equal parts as
    for `length_ramp`, so that a step has as many tokens in every phase."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary positions in this phase; `model.rope_theta` if absent. What is exported has the last phase's
    (Xiong et al. 2023 raise it for a last phase of long rows)."""
    rope_scaling: RopeScaling | None = None
    """How rotary positions are stretched in this phase; `model.rope_scaling` if absent."""


READING_KEYS = ("steps", "global_batch_size", "batch_ramp", "seed")
"""The keys of `pretrain` that decide which rows of the packed set are read."""


def _steps_or_size(schema: dict[str, Any]) -> None:
    """What editors are told: the steps need not be written where they follow from a size."""
    schema["required"] = [name for name in schema["required"] if name != "steps"]
    schema["anyOf"] = [{"required": [name]} for name in ("steps", "size", "depth")]


class Pretrain(Objectives, Training):
    """Training on the packed set: of a decoder that predicts the next token, unless another objective is given."""

    added: ClassVar[tuple[str, ...]] = (
        "phases",
        "masked",
        "prefix_lm",
        "multi_token",
        "span_corruption",
        "ul2",
        "blank_infilling",
    )

    model_config = ConfigDict(json_schema_extra=_steps_or_size)

    phases: tuple[TrainingPhase, ...] = ()
    """For each of `mix.phases`, in order: learning rate and row length in it. A phase begins with the first step that
    reads none of the rows before it, rollbacks not counted. See docs/phases.md."""

    size: Annotated[str, Field(pattern=SIZE_PATTERN)] | None = Field(default=None, exclude=True)
    """Weights in the layers, such as `30m` (`k`, `m`, `b`): the nearest `depth` is taken, and all else follows."""
    depth: Annotated[int, Field(gt=0, le=MOST_DEPTH)] | None = Field(default=None, exclude=True)
    """Layers, from which follow `model.width` and `heads`, `global_batch_size`, `optimizer.learning_rate` and
    `weight_decay`, and `steps`, by the rules of docs/size-and-laws.md; what is written besides wins. `gristmill plan`
    prints what came out, which alone is in the fingerprint."""
    tokens_per_parameter: PositiveFloat | None = Field(default=None, exclude=True)
    """With `size` or `depth`: tokens to train on for each weight of the layers; 20 if absent (Hoffmann et al. 2022)."""
    batch_ramp: tuple[BatchStage, ...] = ()
    """Batch sizes of the first steps, in order; `global_batch_size` holds after the last entry. The rows are read in
    the same order as without a ramp, none twice and none skipped; the learning rate follows the steps."""
    length_ramp: tuple[LengthStage, ...] = ()
    """Shorter rows for the first steps, in order; the packed set's length holds after the last entry. A row of the
    set is cut into equal parts that are read side by side, so a step has as many tokens as without a ramp (short
    rows first: Li et al. 2022, "The Stability-Efficiency Dilemma")."""

    model: Model = Model()
    """The decoder that is trained."""
    z_loss: float = Field(default=0.0, ge=0.0)
    """Weight of the squared log of the softmax's normaliser, which keeps logits from drifting (PaLM, Chowdhery et al.
    2022, section 5: 1e-4)."""
    float8: Literal["off", "tensorwise", "rowwise"] = "off"
    """Multiply in 8 bits inside the layers, scaled by matrix or by row, through torchao (extra `quant`); needs a GPU
    that can (H100, H200) and `engine.compute.compile`, without which it is slower than bf16 (nanochat measured 0.23 of
    its speed). Pays from about 1B parameters on: nanochat's 26 layers gained 17 % raw speed, its 12 lost."""
    validate_every: Positive = 100
    """Steps between validations."""
    early_stopping: EarlyStopping | None = None
    """Ends the training where the held-out loss no longer falls; it runs to its last step if absent."""
    tasks: tuple[Task, ...] = ()
    """Asked while training; those of kind `generate` are for the stage `evaluate` alone."""
    evaluate_every: Positive | None = None
    """Steps between these; as often as validations if absent."""

    @model_validator(mode="after")
    def _one_dial(self) -> Pretrain:
        if self.size is None and self.depth is None:
            if self.tokens_per_parameter is not None:
                raise ValueError("tokens_per_parameter goes with size or depth; give one of them, or steps instead")
            return self
        name = "depth" if self.size is None else "size"
        if self.size is not None and self.depth is not None:
            raise ValueError("size and depth both give the shape of the model; remove one of them")
        if whole := [key for key in SHAPE_KEYS if getattr(self.model, key) is not None]:
            raise ValueError(f"{name} gives the shape of the model, and so does model.{whole[0]}; remove one of them")
        kind = "your own" if self.optimizer.own is not None else self.optimizer.kind
        if kind not in AT_ADAMWS_SCALE and "learning_rate" not in self.optimizer.model_fields_set:
            raise ValueError(
                f"{name} gives the learning rate of {', '.join(AT_ADAMWS_SCALE)}, and the optimizer is "
                f"{kind}; give optimizer.learning_rate"
            )
        return self

    @property
    def width_factor(self) -> float:
        """The width over muP's base width; 1 without muP."""
        base = self.model.mup_base_width
        return 1.0 if base is None else self.model.width / base

    @model_validator(mode="after")
    def _has_mups_rule(self) -> Pretrain:
        kind = "one of your own" if self.optimizer.use is not None else self.optimizer.kind
        if self.model.mup_base_width is not None and kind not in MUP_KINDS:
            raise ValueError(
                f"model.mup_base_width scales the rates of {', '.join(MUP_KINDS)}, and the optimizer is "
                f"{kind}; choose one of these, or remove it"
            )
        if self.model.mup_base_width is not None and self.masked is not None:
            raise ValueError(
                "model.mup_base_width knows the matrices of decoders, and `masked` trains an encoder; "
                "remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _knows_the_layers(self) -> Pretrain:
        if self.model.use is None:
            return self
        if self.float8 != "off":
            raise ValueError(
                "float8 needs the built-in decoder, whose layers it multiplies in 8 bits; remove it beside model.use"
            )
        if self.optimizer.kind in ON_MATRICES and self.optimizer.use is None:
            raise ValueError(
                f"optimizer.kind cannot be {self.optimizer.kind} beside model.use: it takes the matrices "
                "of the built-in decoder's layers; choose another kind"
            )
        return self

    @model_validator(mode="after")
    def _one_length_a_step(self) -> Pretrain:
        if self.length_ramp and any(phase.sequence_length is not None for phase in self.phases):
            raise ValueError(
                "length_ramp and the sequence_length of phases both say how long rows are; give one of them"
            )
        return self

    @model_validator(mode="after")
    def _objectives_fit(self) -> Pretrain:
        problem = objective_problem(self)
        if problem is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _tasks_are_likelihoods(self) -> Pretrain:
        if writing := [task.name for task in self.tasks if task.kind == "generate"]:
            raise ValueError(
                f"tasks: {writing[0]} is of kind generate, which is not asked while training; move it to `evaluate:`"
            )
        return self

    @model_validator(mode="after")
    def _ramps_ascend(self) -> Pretrain:
        for name, key, stages in (
            ("batch_ramp", "until_step", self.batch_ramp),
            ("batch_ramp", "until_tokens", self.batch_ramp),
            ("length_ramp", "until_step", self.length_ramp),
        ):
            ends = [end for stage in stages if (end := getattr(stage, key)) is not None]
            if any(after <= before for before, after in pairwise(ends)):
                raise ValueError(f"{name}: {key} must increase from entry to entry, not {ends}")
        return self
