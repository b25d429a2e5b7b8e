"""Models of the training stages: descriptions, averages, tuning jobs, gathered weights
and published files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gristmill.core.stage_context import Context
from gristmill.mixtures.manifest import beyond_context
from gristmill.mixtures.posttraining import Dpo, Lora, Tuning
from gristmill.mixtures.reinforcement import Rl
from gristmill.mixtures.training import Training
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.lora import describe_rounding, rounded_tensors
from gristmill.train.adapters.peft_files import settle_adapters
from gristmill.train.evaluation.held_out import Validation, read_token_bytes
from gristmill.train.loop.metrics_log import Record
from gristmill.train.loop.objective import Objective
from gristmill.train.loop.throughput import peak_flops
from gristmill.train.loop.training_job import Job
from gristmill.train.models.model_config import OwnShape, Shape
from gristmill.train.models.weights import save_model
from gristmill.train.optim.averaging import AveragedWeights
from gristmill.train.parallel.process_groups import World
from gristmill.train.parallel.sharding import compute_dtype, whole_tensors
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.stages.stage_inputs import MODEL

MODEL_AVERAGE = "model-average"


def describe_model(shape: Shape | OwnShape, length: int) -> dict[str, Any]:
    """Figures about the model for a stage's summary, with the arithmetic for rows of
    `length` tokens.
    """
    return {
        "parameters": shape.parameters,
        "flops_per_token": shape.flops_per_token(length),
        "context": shape.sequence_length,
    }


def tuned_shape(shape: Shape, length: int, context: Context) -> Shape:
    """Shape of a model to tune on rows of `length` tokens: the longer context of both,
    and causal attention on prompts.

    Warns if the rows have positions that the model was not trained on.
    """
    trained = shape.sequence_length
    if length > trained:
        context.warn(beyond_context(context.stage, length, trained))
    return replace(shape, sequence_length=max(trained, length), prefix_lm=False)


def causal_share(
    shape: Shape | OwnShape, length: int, whole: float | None = None
) -> float:
    """Share of a training's arithmetic that remains if attention to later positions is
    not counted; 1 for own models and models with an encoder.

    Args:
        shape: of the model.
        length: tokens per row.
        whole: arithmetic per token, if not that of training all weights.
    """
    if isinstance(shape, OwnShape) or shape.kind != "decoder":
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


def tuning_job(
    section: Tuning | Dpo | Rl,
    objective: Objective,
    model: nn.Module,
    shape: Shape,
    inputs: Mapping[str, Path],
    packed: PackedSet | None,
    world: World,
    context: Context,
) -> Job:
    """Training job of an existing model; measures the mixture's held-out rows between
    steps.

    Args:
        section: of the stage; may configure a running mean of the weights.
        objective: rows and loss.
        model: sharded.
        shape: of its decoder.
        inputs: of the stage, including the tokenizer.
        packed: the mixture, if there is one.
        world, context: processes and context of the stage.
    """
    average = averaged(model, section)
    return Job(
        section=section,
        objective=objective,
        model=model,
        world=world,
        context=context,
        average=average,
        peak_flops=peak_flops(
            world.device, compute_dtype(section.precision, world.device)
        ),
        causal_share=causal_share(
            shape, objective.sequence_length, objective.flops_per_token
        ),
        after_step=Validation(
            section.validate_every,
            section.steps,
            packed,
            model,
            average,
            read_token_bytes(inputs["tokenizer"], world.device),
            world,
        ),
    )


def all_tensors(
    model: nn.Module, average: AveragedWeights | None
) -> dict[str, dict[str, Tensor]]:
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
    shape: Shape | OwnShape,
    tensors: dict[str, dict[str, Tensor]],
    record: Record,
) -> dict[str, Any]:
    """Write a training stage's models and record into its data folder; returns its last
    measurements.
    """
    for name, weights in tensors.items():
        save_model(out / name, shape, weights)
    record.publish(out)
    return final_measurements(record.lines())


def publish_tuned(
    job: Job,
    lora: Lora | None,
    shape: Shape,
    start: Path,
    out: Path,
    record: Record | None,
    is_extra: Callable[[str], bool] = lambda name: False,
) -> dict[str, Any]:
    """Write a tuned model, its average, adapters and record; a collective call.

    Args:
        job: the finished training.
        lora: its adapters, which are merged into the models.
        shape: of the decoder.
        start: folder of the start model.
        out: the stage's data folder.
        record: on the first rank, which writes.
        is_extra: True for names of parameters that are not published.

    Returns:
        for the summary: the rounding of frozen weights, and on the first rank the last
        measurements.
    """
    tensors = {
        folder: {name: tensor for name, tensor in weights.items() if not is_extra(name)}
        for folder, weights in all_tensors(job.model, job.average).items()
    }
    rounding = describe_rounding(job.model, lora)
    if record is None:
        return rounding
    return rounding | publish(
        out, shape, settle_adapters(out, tensors, lora, start), record
    )


def final_measurements(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last training loss, and the last validation, for a stage's summary."""
    losses = [line["loss"] for line in lines if "loss" in line]
    validations = [line["validation"] for line in lines if "validation" in line]
    averages = [
        line["validation_average"] for line in lines if "validation_average" in line
    ]
    return {
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        **({"validation": validations[-1]} if validations else {}),
        **({"validation_average": averages[-1]} if averages else {}),
    }
