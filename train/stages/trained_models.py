"""Models of the training stages: descriptions, averages, tuning jobs, gathered weights
and published files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn

from gristmill.core.stage_context import Context
from gristmill.mixtures.manifest import beyond_context
from gristmill.mixtures.schema.posttraining import Dpo, Tuning
from gristmill.mixtures.schema.pretrain import Training
from gristmill.mixtures.schema.rl import Rl
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.lora import (
    RoundedMatrices,
    adapted_flops_per_token,
    describe_rounding,
    rounded_tensors,
    tuned_model,
)
from gristmill.train.adapters.peft_files import settle_adapters
from gristmill.train.distributed.fsdp import compute_dtype, whole_tensors
from gristmill.train.distributed.process_groups import World, process_group
from gristmill.train.eval.held_out import Validation, read_token_bytes
from gristmill.train.loop.metrics_log import Record
from gristmill.train.loop.objective import GroupedMetrics, Metrics
from gristmill.train.loop.prefetch import READING_THREADS
from gristmill.train.loop.throughput import Utilisation, peak_flops
from gristmill.train.loop.training_job import (
    UNOBSERVED,
    Job,
    Learner,
    Measure,
    Observers,
)
from gristmill.train.models.model_config import (
    AnyShape,
    Shape,
    StoredShape,
)
from gristmill.train.models.tensor_files import Tensors
from gristmill.train.models.weights import TensorOf, read_shape, save_model, stored
from gristmill.train.optim.averaging import AveragedWeights
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.stages.stage_inputs import MODEL, Inputs, open_rows
from gristmill.train.trainer import TrainingSummary, train

MODEL_AVERAGE = "model-average"


class ModelFigures(TypedDict):
    """Figures about a model.

    Attributes:
        parameters: number of its weights.
        flops_per_token: arithmetic of a training of all weights.
        context: most tokens of a row.
    """

    parameters: int
    flops_per_token: float
    context: int


class Measurements(TypedDict, total=False):
    """Measurements of a finished training, on the first rank.

    Attributes:
        first_loss, last_loss: of the first and the last logged steps.
        validation, validation_average: the last metrics of held-out rows by source, of
            the model and of its running mean, if they were measured.
        lora_base: see lora.describe_rounding; on every rank.
    """

    first_loss: float | None
    last_loss: float | None
    validation: GroupedMetrics
    validation_average: GroupedMetrics
    lora_base: RoundedMatrices


class TunedSummary(TrainingSummary, ModelFigures, Measurements):
    """Summary of a stage that tunes a model on rows of `sequence_length` tokens."""

    sequence_length: int


def describe_model(shape: AnyShape, length: int) -> ModelFigures:
    """Figures about the model, with the arithmetic for rows of `length` tokens."""
    return {
        "parameters": shape.parameters,
        "flops_per_token": shape.flops_per_token(length),
        "context": shape.sequence_length,
    }


def tuned_shape(shape: StoredShape, length: int, context: Context) -> StoredShape:
    """Shape of a model to tune on rows of `length` tokens: the longer context of both,
    and causal attention on prompts.

    Warns if the rows have positions that the model was not trained on.

    Raises:
        gristmill.train.models.model_config.ShapeError: a decoder of transformers does
            not have these positions.
    """
    trained = shape.sequence_length
    if length > trained:
        context.warn(beyond_context(context.stage, length, trained))
    if isinstance(shape, Shape):
        shape = replace(shape, prefix_lm=False)
    return replace(shape, sequence_length=max(trained, length))


def causal_share(shape: AnyShape, length: int, whole: float | None = None) -> float:
    """Share of a training's arithmetic that remains if attention to later positions is
    not counted; 1 for own models and models with an encoder.

    Args:
        shape: of the model.
        length: tokens per row.
        whole: arithmetic per token, if not that of training all weights.
    """
    if shape.kind != "decoder":
        return 1.0
    flops = flops_per_token(shape, length)
    return 1.0 - (flops.attention - flops.causal_attention) / (
        whole or shape.flops_per_token(length)
    )


def averaged(model: nn.Module, section: Training) -> AveragedWeights | None:
    """Running mean of a model's weights, if the section configures one."""
    return (
        None
        if section.average is None
        else AveragedWeights(model, section.average, section.steps)
    )


@dataclass(frozen=True)
class Setup:
    """Model, data and settings of a tuning stage.

    Attributes:
        inputs: folders of the stages before.
        out: folder of the results.
        context: of the stage.
        section: settings.
        start: folder of the first model.
        shape: of the model.
        tensor_of: source of the first weights.
        length: tokens of a row.
        world: the processes.
        packed: mixture whose held-out rows are measured; None without one.
    """

    inputs: Inputs
    out: Path
    context: Context
    section: Tuning | Dpo | Rl
    start: Path
    shape: StoredShape
    tensor_of: TensorOf
    length: int
    world: World
    packed: PackedSet | None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of matrix products."""
        return compute_dtype(self.section.precision, self.world.device)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of the training."""
        return adapted_flops_per_token(self.shape, self.length, self.section.lora)

    def model(self) -> nn.Module:
        """Model before its first step (see lora.tuned_model)."""
        return tuned_model(
            self.shape,
            self.tensor_of,
            self.section.lora,
            self.section.key_seed,
            self.world,
            self.dtype,
            self.context,
        )


@contextmanager
def tuning(
    inputs: Inputs,
    section: Tuning | Dpo | Rl,
    start: Path,
    length: int,
    out: Path,
    context: Context,
) -> Iterator[Setup]:
    """Open the processes of a tuning stage, and its mixture."""
    with (
        # the mixture's held-out rows are measured
        open_rows(inputs["mix"], context)
        if "mix" in inputs
        else nullcontext() as packed,
        process_group(
            context.training.parallel, split_rows=False, split=section.lora is None
        ) as world,
    ):
        yield Setup(
            inputs,
            out,
            context,
            section,
            start,
            tuned_shape(read_shape(start), length, context),
            stored(start),
            length,
            world,
            packed,
        )


def tune(
    setup: Setup,
    learner: Learner,
    observers: Observers = UNOBSERVED,
    threads: int = READING_THREADS,
) -> tuple[Record | None, TunedSummary]:
    """Train from the weights of an existing model and publish the result.

    Args:
        setup: of the stage; its section in steps.
        learner: objective, model and running mean.
        observers: of the steps.
        threads: number of steps that are read concurrently.

    Returns:
        the record (on the first rank), and a summary.
    """
    section, world, shape = setup.section, setup.world, setup.shape
    validation = Validation(
        section.validate_every,
        section.steps,
        setup.packed,
        learner.model,
        learner.average,
        read_token_bytes(setup.inputs["tokenizer"], world.device),
        world,
    )
    record, summary = train(
        Job(
            section=section,
            learner=learner,
            world=world,
            context=setup.context,
            observers=replace(
                observers, after_step=measuring(validation, observers.after_step)
            ),
            reading_threads=threads,
            utilisation=Utilisation(
                peak_flops(world.device, setup.dtype),
                causal_share(shape, setup.length, learner.objective.flops_per_token),
            ),
        )
    )
    tensors = all_tensors(learner.model, learner.average)
    rounding = describe_rounding(learner.model, section.lora)
    if record is not None:
        publish(
            setup.out,
            shape,
            settle_adapters(setup.out, tensors, section.lora, setup.start),
            record,
        )
    return record, {
        **summary,
        **final_measurements(record, rounding),
        **describe_model(shape, setup.length),
        "sequence_length": setup.length,
    }


def measuring(*measures: Measure) -> Measure:
    """Merge the results of several measurements after a step into one line; None for
    steps without any.
    """

    def after_step(step: int) -> Metrics | None:
        lines = [measure(step) for measure in measures]
        merged = {key: value for line in lines if line for key, value in line.items()}
        return merged or None

    return after_step


def all_tensors(
    model: nn.Module, average: AveragedWeights | None
) -> dict[str, Tensors]:
    """Full master weights by their target folder, on the first rank; a collective call.

    Frozen matrices that are stored rounded are included, dequantised.
    """
    frozen = rounded_tensors(model)
    tensors = {MODEL: whole_tensors(model) | frozen}
    if average is not None:
        with average.in_place():
            # In one process the full tensors are the model's storage, which gets its
            # own weights back.
            tensors[MODEL_AVERAGE] = {
                name: tensor.clone() for name, tensor in whole_tensors(model).items()
            } | frozen
    return tensors


def publish(
    out: Path,
    shape: AnyShape,
    tensors: dict[str, Tensors],
    record: Record,
) -> None:
    """Write a training stage's models and record into its data folder."""
    for name, weights in tensors.items():
        save_model(out / name, shape, weights)
    record.publish(out)


def final_measurements(
    record: Record | None, rounding: RoundedMatrices | None = None
) -> Measurements:
    """Measurements of a finished training.

    Args:
        record: on the first rank.
        rounding: of its frozen weights.
    """
    measurements: Measurements = {}
    if record is not None:
        lines = record.lines()
        losses = [line["loss"] for line in lines if "loss" in line]
        measurements["first_loss"] = losses[0] if losses else None
        measurements["last_loss"] = losses[-1] if losses else None
        for line in lines:
            if "validation" in line:
                measurements["validation"] = line["validation"]
            if "validation_average" in line:
                measurements["validation_average"] = line["validation_average"]
    if rounding is not None:
        measurements["lora_base"] = rounding
    return measurements
