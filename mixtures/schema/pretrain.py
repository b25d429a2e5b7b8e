"""The section `pretrain`, and the settings of every training: loop, optimizer, schedule
and averages.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field
from pydantic.json_schema import JsonSchemaValue

from gristmill.mixtures.base import (
    Count,
    Fraction,
    InnerFraction,
    NotNegative,
    Omissible,
    OutsidePath,
    Positive,
    PositiveFloat,
    Section,
    Seeded,
)
from gristmill.mixtures.objectives.token_objectives import (
    Objectives,
    objective_problems,
)
from gristmill.mixtures.scaling.size_rules import (
    MOST_DEPTH,
    SHAPE_KEYS,
    SIZE_PATTERN,
)
from gristmill.mixtures.schema.evaluation import Task
from gristmill.mixtures.schema.model import Model, RopeScaling
from gristmill.mixtures.schema.optimizer import OPTIMIZERS, Optimizer
from gristmill.mixtures.user_code import (
    BuiltInOrOwn,
    OwnCall,
    OwnFunction,
    check_signature,
    stated_signature,
)

WARMUP_STEPS = 20
"""Warm-up steps of a training that is long enough; in shorter ones the rate rises over
a tenth of the steps (the share in alignment-handbook's recipes, warmup_ratio 0.1).
"""

ScheduleKind = Literal["wsd", "cosine", "linear", "constant"]


class Schedule(BuiltInOrOwn):
    """Learning rate as a function of the step."""

    takes: ClassVar[tuple[str, ...] | None] = ("step", "steps")

    kind: ScheduleKind = "wsd"
    """`wsd`: warm-up, stable, decay (Hu et al. 2024); `cosine`, `linear`: decay from
    the end of the warm-up; `constant`. Write any other as a function (`use`).
    """
    warmup_steps: Count | None = None
    """Steps over which the rate rises linearly from 0; if absent 20, but at most a
    tenth of all steps.
    """
    decay_fraction: Fraction = 0.3
    """Share of the steps in which WSD decays (Hu et al. 2024)."""
    decay: Literal["linear", "cosine", "one_minus_sqrt"] = "linear"
    """Shape of WSD's decay; `one_minus_sqrt` falls as 1 - sqrt(progress) (Hägele et al.
    2024).
    """
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a share of the peak; not for `constant`."""

    def _problems(self) -> Iterator[str]:
        yield from self.unused_beside_own("schedule")

    def warmup_of(self, steps: int) -> int:
        """Return the warm-up steps of a training of `steps` steps."""
        return (
            min(WARMUP_STEPS, steps // 10)
            if self.warmup_steps is None
            else self.warmup_steps
        )


class Average(Section):
    """A second set of weights: the mean of the weights during training, which does not
    influence the training.
    """

    kind: Literal["ema", "swa"] = "ema"
    """`ema`: exponential moving average; `swa`: the plain mean since the start
    (Izmailov et al. 2018).
    """
    decay: InnerFraction = 0.999
    """Decay of the exponential average, per update (Marin's 32B run: 0.995)."""
    start_fraction: Fraction = 0.0
    """Share of the steps after which averaging starts; until then the average is the
    weights themselves.
    """
    every: Positive = 1
    """Steps between contributions."""


HOW_KEYS = (
    "micro_batch_size",
    "log_every",
    "validate_every",
    "evaluate_every",
    "generation_rows",
    "samples_every",
)
"""Keys of a training that control its computation or its measurements. They change
weights only by rounding, so they are not in fingerprints, and a resumed training may
change them.
"""


MEASURING_KEYS = ("log_every", "validate_every", "evaluate_every")
"""The keys of `HOW_KEYS` that determine what callbacks see, and when."""


class Spikes(Section):
    """Rules for skipping steps: those whose loss or gradient is NaN or Inf, or whose
    loss is far above recent losses.

    A skipped step does not change weights. Its loss-spike report in `autopsies/`
    (JSON) lists what it read, ordered by loss; `exclude.txt` has the ids of the
    worst documents, one per line.
    """

    sigma: PositiveFloat | None = 6.0
    """Deviations above the running mean from which a loss is a spike (OLMo-core: 6);
    null: only a loss or gradient of NaN or Inf skips a step.
    """
    window: Annotated[int, Field(ge=4)] = 128
    """Steps in the running mean; spikes are detected once half of the window is filled
    (OLMo-core: 128).
    """


class EarlyStopping(Section):
    """Condition for ending a training before its last step."""

    patience: Positive
    """Consecutive validations without a better loss (per token, over all sources) after
    which the training ends.
    """
    min_delta: NotNegative = 0.0
    """Smallest improvement over the best loss so far that counts, in nats per token."""


CallbackEvent = Literal["after_step", "after_validation", "on_checkpoint"]


class Callback(OwnCall):
    """Code that watches a training, and may end it: a function of one event, or a class
    with a method for each event that it handles. It sees metrics, but neither data nor
    weights. Examples are in docs/own-training.md.
    """

    on: CallbackEvent | None = None
    """Event at which a function is called: `after_step` if absent. A class names events
    by its methods.
    """

    def check_code(self, code: OwnFunction) -> None:
        """Check that a function takes metrics, and a class its options; see
        `OwnPlace.check_code`.
        """
        signature = stated_signature(code)
        if signature is not None:
            positional = (
                () if isinstance(code.definition(), ast.ClassDef) else ("metrics",)
            )
            check_signature(code, signature, positional, self.options)


Precision = Literal["auto", "fp32", "bf16"]
"""Names of compute dtypes."""


class Training(Seeded):
    """Settings of every training stage."""

    steps: Positive
    """Optimizer steps."""
    global_batch_size: Positive = 16
    """Rows (or pairs) per optimizer step, over all ranks and micro-batches."""
    micro_batch_size: Positive = 16
    """Largest number of rows (or pairs) per forward pass on one rank. It changes the
    result only by rounding: a training that ran out of memory resumes with a smaller
    one.
    """
    optimizer: Optimizer = Optimizer()
    """The update rule."""
    schedule: Schedule = Schedule()
    """Learning rate as a function of the step."""
    average: Average | None = None
    """A running mean of the weights: validated besides them, saved as `model-average`,
    and exported if `export.weights` is `average`. Not kept if absent.
    """
    precision: Precision = "auto"
    """Compute dtype; `auto` is bf16 on a GPU and fp32 on a CPU."""
    log_every: Positive = 10
    """Steps between records of loss and speed."""
    spikes: Spikes = Spikes()
    """Rules for skipping steps."""
    seed: int | None = None
    """Seed of initialisation and order; the manifest's if absent."""
    continue_from: OutsidePath | None = None
    """A checkpoint of another training (its folder `step-...`) to continue from, with
    its weights, optimizer and step: to make a training longer, to change its schedule
    midway, or to continue with a set from which documents were removed that it has not
    read yet (`mix.exclude`, `gristmill takedown`). It is an error unless that training
    began with the same model and has read exactly what the first steps of this one
    would read.
    """

    callbacks: Omissible[tuple[Callback, ...]] = ()
    """Your own code that watches the training, and may end it before its last step."""

    @property
    def width_factor(self) -> float:
        """The width over muP's base width; 1 without muP."""
        return 1.0

    @property
    def how(self) -> dict[str, object]:
        """The keys of `HOW_KEYS` that this training has, with their defaults.

        Keys of measurements are excluded if the measurements may end the training.
        """
        stopping = (
            ("validate_every",)
            if getattr(self, "early_stopping", None) is not None
            else ()
        )
        deciding = MEASURING_KEYS if self.callbacks else stopping
        return {
            key: field.default
            for key, field in type(self).model_fields.items()
            if key in HOW_KEYS and key not in deciding
        }


class TrainingInEpochs(Training):
    """Training of an existing model on examples, with its length in steps or in
    epochs.
    """

    added: ClassVar[tuple[str, ...]] = ("epochs",)
    # Editors learn that one of the two keys is needed.
    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["steps"]}, {"required": ["epochs"]}]}
    )

    steps: Count = 0
    """Optimizer steps; computed from `epochs` if absent."""
    epochs: PositiveFloat | None = None
    """Number of times that all training examples are read, instead of `steps`; the last
    step of the last epoch is a full step.
    """

    def _problems(self) -> Iterator[str]:
        if bool(self.steps) == (self.epochs is not None):
            yield "give either steps or epochs"

    def in_steps(self, rows: int) -> Self:
        """Return the same training with its length in steps.

        Args:
            rows: rows that an epoch reads.
        """
        if self.epochs is None:
            return self
        return self.model_copy(
            update={"steps": self.steps_of_epochs(self.epochs, rows), "epochs": None}
        )

    def steps_of_epochs(self, epochs: float, rows: int) -> int:
        """Return the steps that read `rows` rows `epochs` times."""
        return math.ceil(epochs * rows / self.global_batch_size)


class BatchStage(Section):
    """The batch size up to a step, or until a number of tokens has been read; exactly
    one of the two.
    """

    until_step: Positive | None = None
    """Last step of this size, counted from 1."""
    until_tokens: Positive | None = None
    """Number of read tokens until which steps begin with this size."""
    global_batch_size: Positive
    """Rows per optimizer step."""

    def _problems(self) -> Iterator[str]:
        if (self.until_step is None) == (self.until_tokens is None):
            yield (
                "an entry of batch_ramp ends at `until_step` or at "
                "`until_tokens`: give exactly one"
            )


class LengthStage(Section):
    """The length of rows up to a step."""

    until_step: Positive
    """Last step of this length, counted from 1."""
    sequence_length: Positive
    """Tokens per row; must divide the packed set's length."""


class TrainingPhase(Section):
    """Settings of a phase of the mixture (`mix.phases`) besides its weights."""

    added = ("rope_theta", "rope_scaling")

    learning_rate_scale: NotNegative = 1.0
    """Factor of the schedule's learning rate in this phase."""
    sequence_length: Positive | None = None
    """Tokens per row in this phase; must divide the packed set's length, which applies
    if absent. Rows are cut into equal parts as for `length_ramp`, so that a step has
    the same number of tokens in every phase.
    """
    rope_theta: PositiveFloat | None = None
    """Base of the rotary positions in this phase; `model.rope_theta` if absent. The
    exported model has the last phase's base (Xiong et al. 2023 raise it for a last
    phase of long rows).
    """
    rope_scaling: RopeScaling | None = None
    """Stretching of rotary positions in this phase; `model.rope_scaling` if absent."""


READING_KEYS = ("steps", "global_batch_size", "batch_ramp", "seed")
"""Keys of `pretrain` that determine which rows of the packed set are read."""


def _steps_or_size(schema: JsonSchemaValue) -> None:
    """Tell editors that `steps` may be absent if it follows from a size."""
    schema["required"] = [name for name in schema["required"] if name != "steps"]
    schema["anyOf"] = [{"required": [name]} for name in ("steps", "size", "depth")]


class Pretrain(Objectives, Training):
    """Training on the packed set: of a decoder that predicts the next token, unless
    another objective is set.
    """

    added: ClassVar[tuple[str, ...]] = (
        "phases",
        "masked",
        "prefix_lm",
        "span_corruption",
        "ul2",
        "blank_infilling",
        "goldfish",
        "validation_set",
    )

    model_config = ConfigDict(json_schema_extra=_steps_or_size)

    phases: tuple[TrainingPhase, ...] = ()
    """Learning rate and row length of each of `mix.phases`, in order. A phase begins
    with the first step that reads only rows of that phase or later ones. See
    docs/phases.md.
    """

    size: Annotated[str, Field(pattern=SIZE_PATTERN)] | None = Field(
        default=None, exclude=True
    )
    """Number of weights in the layers, such as `30m` (`k`, `m`, `b`): the nearest
    `depth` is used, and determines the rest.
    """
    depth: Annotated[int, Field(gt=0, le=MOST_DEPTH)] | None = Field(
        default=None, exclude=True
    )
    """Number of layers, from which `model.width` and `heads`, `global_batch_size`,
    `optimizer.learning_rate` and `weight_decay`, and `steps` are derived by the rules
    of docs/size-and-laws.md; keys that the manifest sets take precedence. `gristmill
    plan` prints the derived values, and only these are in the fingerprint.
    """
    tokens_per_parameter: PositiveFloat | None = Field(default=None, exclude=True)
    """With `size` or `depth`: training tokens per weight of the layers; 20 if absent
    (Hoffmann et al. 2022).
    """
    batch_ramp: tuple[BatchStage, ...] = ()
    """Batch sizes of the first steps, in order; `global_batch_size` applies after the
    last entry. The rows are read in the same order as without a ramp, each exactly
    once; the learning rate follows the steps.
    """
    length_ramp: tuple[LengthStage, ...] = ()
    """Shorter rows for the first steps, in order; the packed set's length applies after
    the last entry. A row of the set is cut into equal parts that are read side by side,
    so a step has the same number of tokens as without a ramp (short rows first: Li et
    al. 2022, "The Stability-Efficiency Dilemma").
    """

    model: Model = Model()
    """The decoder to train."""
    z_loss: NotNegative = 0.0
    """Weight of the squared log of the softmax's normaliser, which keeps logits from
    drifting (PaLM, Chowdhery et al. 2022, section 5: 1e-4).
    """
    float8: Literal["off", "tensorwise", "rowwise"] = "off"
    """Multiply in 8 bits inside the layers, scaled by matrix or by row, through torchao
    (extra `quant`); needs a GPU that supports it (H100, H200) and
    `engine.compute.compile`, without which it is slower than bf16 (nanochat measured
    0.23 of its speed). Pays off from about 1B parameters: nanochat's 26 layers gained
    17 % raw speed, its 12 layers lost.
    """
    validate_every: Positive = 100
    """Steps between validations."""
    validation_set: OutsidePath | None = None
    """Folder of a packed set (the output of `mix` of another manifest with the same
    tokenizer) whose held-out rows are measured; those of the own mixture if absent.
    Trainings on differently prepared documents are only comparable on the same rows.
    """
    early_stopping: EarlyStopping | None = None
    """Ends the training when the held-out loss no longer falls; it runs to its last
    step if absent.
    """
    tasks: tuple[Task, ...] = ()
    """Tasks to measure during training; those of kind `generate` are only for the stage
    `evaluate`.
    """
    evaluate_every: Positive | None = None
    """Steps between measurements of `tasks`; as often as validations if absent."""

    def _problems(self) -> Iterator[str]:
        kind = "your own" if self.optimizer.own is not None else self.optimizer.kind
        has_size, has_depth = self.size is not None, self.depth is not None
        name = "size" if has_size else "depth"
        if self.tokens_per_parameter is not None and not (has_size or has_depth):
            yield (
                "tokens_per_parameter goes with size or depth; give "
                "one of them, or steps instead"
            )
        if has_size and has_depth:
            yield (
                "size and depth both determine the shape of the model; "
                "remove one of them"
            )
        if has_size or has_depth:
            for key in SHAPE_KEYS:
                if getattr(self.model, key) is not None:
                    yield (
                        f"{name} determines the shape of the model, and so does "
                        f"model.{key}; remove one of them"
                    )
            at_adamws_rate = [
                optimizer
                for optimizer, facts in OPTIMIZERS.items()
                if facts.adamws_rate
            ]
            if (
                kind not in at_adamws_rate
                and "learning_rate" not in self.optimizer.model_fields_set
            ):
                yield (
                    f"{name} determines the learning rate of "
                    f"{', '.join(at_adamws_rate)}, but the optimizer is {kind}; set "
                    "optimizer.learning_rate"
                )
        scaled = [
            optimizer for optimizer, facts in OPTIMIZERS.items() if facts.fixed_size
        ]
        if self.model.mup_base_width is not None and kind not in scaled:
            yield (
                f"model.mup_base_width scales the rates of {', '.join(scaled)}, but "
                f"the optimizer is {kind}; choose one of these, or remove it"
            )
        if self.model.mup_base_width is not None and self.masked is not None:
            yield (
                "model.mup_base_width knows the matrices of decoders, but `masked` "
                "trains an encoder; remove one of the two"
            )
        if self.model.use is not None and self.float8 != "off":
            yield (
                "float8 needs the built-in decoder, whose layers it multiplies in 8 "
                "bits; remove it beside model.use"
            )
        if (
            self.model.use is not None
            and self.optimizer.use is None
            and OPTIMIZERS[self.optimizer.kind].on_matrices
        ):
            yield (
                f"optimizer.kind cannot be {self.optimizer.kind} beside model.use: "
                "it updates the matrices "
                "of the built-in decoder's layers; choose another kind"
            )
        if self.length_ramp and any(
            phase.sequence_length is not None for phase in self.phases
        ):
            yield (
                "length_ramp and the sequence_length of phases both set "
                "the row length; use one of them"
            )
        yield from objective_problems(self)
        for task in self.tasks:
            if task.kind == "generate":
                yield (
                    f"tasks: {task.name} is of kind generate, which is not "
                    "measured during training; move it to `evaluate:`"
                )
        for name, key, stages in (
            ("batch_ramp", "until_step", self.batch_ramp),
            ("batch_ramp", "until_tokens", self.batch_ramp),
            ("length_ramp", "until_step", self.length_ramp),
        ):
            ends = [end for stage in stages if (end := getattr(stage, key)) is not None]
            if any(after <= before for before, after in pairwise(ends)):
                yield f"{name}: {key} must increase from entry to entry, not {ends}"

    @property
    def width_factor(self) -> float:
        """The width over muP's base width; 1 without muP."""
        base = self.model.mup_base_width
        return 1.0 if base is None else self.model.width / base
