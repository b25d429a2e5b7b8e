"""The section `pretrain`, and what all trainings have in common."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

from gristmill.mixtures.evaluation import Task
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


class BatchStage(Section):
    """The size of a batch up to a step, or until so many tokens were read; exactly one of the two."""

    until_step: Positive | None = None
    """The last step, counted from 1, of this size."""
    until_tokens: Positive | None = None
    """This size holds for the steps that begin before so many tokens have been read."""
    global_batch_size: Positive
    """Rows per optimizer step."""

    @model_validator(mode="after")
    def _one_end(self) -> BatchStage:
        if (self.until_step is None) == (self.until_tokens is None):
            raise ValueError("a stage of batch_ramp ends at `until_step` or at `until_tokens`: give one of the two")
        return self


class LengthStage(Section):
    """The length of rows up to a step."""

    until_step: Positive
    """The last step, counted from 1, of this length."""
    sequence_length: Positive
    """Tokens per row; divides the packed set's."""


class Pretrain(Training):
    """Next-token training on the packed set."""

    batch_ramp: tuple[BatchStage, ...] = ()
    """Batch sizes of the first steps, in order; `global_batch_size` holds after the last stage. The rows are read in
    the same order as without a ramp, none twice and none skipped; the learning rate goes on by steps."""
    length_ramp: tuple[LengthStage, ...] = ()
    """Shorter rows for the first steps, in order; the packed set's length holds after the last stage. A row of the
    set is cut into equal parts that are read side by side, so a step has as many tokens as without a ramp (short
    rows first: Li et al. 2022, "The Stability-Efficiency Dilemma")."""

    model: Model = Model()
    """The decoder that is trained."""
    z_loss: float = Field(default=0.0, ge=0.0)
    """Weight of the squared log of the softmax's normaliser, which keeps logits from drifting (PaLM, Chowdhery et al.
    2022, section 5: 1e-4)."""
    validate_every: Positive = 100
    """Steps between validations."""
    tasks: tuple[Task, ...] = ()
    """Asked while training; those of kind `generate` are for the stage `evaluate` alone."""
    evaluate_every: Positive | None = None
    """Steps between these; as often as validations if absent."""

    @model_validator(mode="after")
    def _tasks_are_likelihoods(self) -> Pretrain:
        if writing := [task.name for task in self.tasks if task.kind == "generate"]:
            raise ValueError(f"tasks: {writing[0]} is of kind generate, which is not asked while training; move it to "
                             "`evaluate:`")
        return self

    @model_validator(mode="after")
    def _ramps_ascend(self) -> Pretrain:
        for name, key, stages in (("batch_ramp", "until_step", self.batch_ramp),
                                  ("batch_ramp", "until_tokens", self.batch_ramp),
                                  ("length_ramp", "until_step", self.length_ramp)):
            ends = [end for stage in stages if (end := getattr(stage, key)) is not None]
            if any(after <= before for before, after in pairwise(ends)):
                raise ValueError(f"{name}: {key} must ascend from stage to stage, not {ends}")
        return self
