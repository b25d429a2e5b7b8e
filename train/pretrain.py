"""Stage `pretrain`: a new decoder learns the packed set.

Output: `model/config.json`, `model/model.safetensors` (float32), `metrics.jsonl`, `skipped_steps.jsonl`; where the
section asks for them or a step was skipped `model-average/` and `autopsies/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import as_path
from gristmill.mixtures.manifest import beyond_context
from gristmill.mixtures.model import Model
from gristmill.mixtures.training import Pretrain, Training
from gristmill.tokenize.origins import known_of
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.frozen import rounded_tensors
from gristmill.train.evaluation.readers import InLoopTasks, open_reader
from gristmill.train.evaluation.validation import Validation
from gristmill.train.loop.batches import reading_threads
from gristmill.train.loop.loop import Job, train
from gristmill.train.loop.record import Record
from gristmill.train.loop.stream import plan_of
from gristmill.train.loop.throughput import peak_flops
from gristmill.train.models.shape import Shape, shape_of
from gristmill.train.models.weights import TensorOf, WeightsError, drawn, read_shape, save_model, stored
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.optim.averaging import AveragedWeights
from gristmill.train.parallel.sharding import compute_dtype, sharded_model, whole_tensors
from gristmill.train.parallel.world import process_group
from gristmill.train.planning.compute import flops_per_token

TOKEN_BYTES = "token_bytes.npy"
MODEL, MODEL_AVERAGE = "model", "model-average"


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Pre-train; called on every rank of a torchrun process group.

    Raises:
        gristmill.train.loop.stopping.StoppedError: SIGTERM came; a rerun continues.
    """
    section = Pretrain.model_validate(config)
    seed = section.seed or 0
    with closing(PackedSet(inputs["mix"], context.stream, context.warn)) as packed:
        check_stages(packed, section)
        shape, tensor_of = starting_model(section.model, packed, seed)
        length = packed.sequence_length
        with process_group(context.parallel) as world:
            dtype = compute_dtype(section.precision, world.device)
            model = sharded_model(shape, tensor_of, world, dtype, context.compute, section.float8)
            token_bytes = read_token_bytes(inputs["tokenizer"], world.device)
            average = averaged(model, section)
            job = Job(
                section=section, model=model, world=world, context=context, peak_flops=peak_flops(world.device, dtype),
                causal_share=causal_share(shape, length),
                objective=NextToken(packed, seed, token_bytes, shape, section.z_loss),
                after_step=_InLoop(
                    Validation(section.validate_every, section.steps, packed, model, average, token_bytes, world),
                    InLoopTasks(section.tasks, open_reader(model, inputs["tokenizer"], world),  # type: ignore[arg-type]
                                section.evaluate_every or section.validate_every, section.steps)),
                average=average, decode=decoder(inputs["tokenizer"]),
                known=partial(known_of, packed, context.origins) if "ingest" in context.origins else None,
                reading_threads=reading_threads(packed.local, world.device),
            )
            record, summary = train(job)
            tensors = all_tensors(model, average)
            if record is not None:
                summary |= publish(out, shape, tensors, record)
    return {**summary, **describe_model(shape, length), "dtype": str(dtype).removeprefix("torch."),
            "world_size": world.size}


def check_stages(packed: PackedSet, section: Pretrain) -> None:
    """See that a training with these settings reads a staged set no further than its end, before it begins.

    Raises:
        gristmill.tokenize.packed_files.PackedSetError: it would.
    """
    first, size = plan_of(section, packed.sequence_length).positions(section.steps - 1)
    packed.check_reads(first + size)


def starting_model(model: Model, packed: PackedSet, seed: int) -> tuple[Shape, TensorOf]:
    """The shape of the model to train, and where its first weights come from: drawn, or a checkpoint.

    Raises:
        WeightsError: the mixture's tokenizer has ids that the checkpoint does not.
        gristmill.train.models.families.UnknownArchitectureError: this decoder cannot run the checkpoint.
    """
    vocab_size = packed.manifest["tokenizer"]["vocab_size"]
    if model.init_from is None:
        shape = shape_of(model, vocab_size, packed.sequence_length)
        return shape, drawn(shape, seed, model.init)
    folder = as_path(model.init_from)
    shape = read_shape(folder)
    if vocab_size > shape.vocab_size:
        raise WeightsError(f"pretrain.model.init_from {folder}: the model has {shape.vocab_size} ids, but the mixture "
                           f"was tokenised with {vocab_size}; give its own tokenizer as tokenizer.path")
    length = max(shape.sequence_length, packed.sequence_length)
    return replace(shape, sequence_length=length, document_mask=model.document_mask), stored(folder)


class _InLoop:
    """What is measured between steps: held-out rows and tasks, each at its own steps, on one line."""

    def __init__(self, validation: Validation, tasks: InLoopTasks) -> None:
        self._validation, self._tasks = validation, tasks

    def __call__(self, step: int) -> dict[str, Any] | None:
        answered = self._tasks(step)
        line = {**(self._validation(step) or {}), **({"tasks": answered} if answered else {})}
        return line or None


def read_token_bytes(tokenizer: Path, device: torch.device) -> Tensor:
    """How many bytes of text each id stands for: (vocab,) float32; special tokens stand for none."""
    with (tokenizer / TOKEN_BYTES).open("rb") as stream:
        return torch.from_numpy(np.load(stream).astype(np.float32)).to(device)


def describe_model(shape: Shape, length: int) -> dict[str, Any]:
    """Figures about the model for a stage's summary, with the arithmetic of rows of so many tokens."""
    return {"parameters": shape.parameters, "flops_per_token": shape.flops_per_token(length),
            "context": shape.sequence_length}


def tuned_shape(shape: Shape, length: int, context: Context) -> Shape:
    """The shape of a model that is tuned on rows of so many tokens: its context is the longer of both.

    Warns where those rows have positions that the model was never trained on.
    """
    trained = shape.sequence_length
    if length > trained:
        context.warn(beyond_context(context.stage, length, trained))
    return replace(shape, sequence_length=max(trained, length))


def causal_share(shape: Shape, length: int, whole: float | None = None) -> float:
    """What remains of a training's arithmetic where attention to later positions is not counted.

    Args:
        shape: of the decoder.
        length: tokens per row.
        whole: the arithmetic per token, if it is not that of training all weights.
    """
    flops = flops_per_token(shape, length)
    return 1.0 - (flops.attention - flops.causal_attention) / (whole or shape.flops_per_token(length))


def averaged(model: nn.Module, section: Training) -> AveragedWeights | None:
    """The running mean of a model's weights that the section asks for, if it does."""
    return None if section.average is None else AveragedWeights(model, section.average, section.steps)


def decoder(tokenizer: Path) -> Callable[[Sequence[int]], str]:
    """From token ids to text; the tokenizer is read when it is first needed."""

    def decode(ids: Sequence[int]) -> str:
        from gristmill.tokenize.encoding.tokenizer import load

        return load(tokenizer).decode(ids)

    return decode


def all_tensors(model: nn.Module, average: AveragedWeights | None) -> dict[str, dict[str, Tensor]]:
    """Whole master weights by the folder that they go to, on the first rank; every rank calls this together.

    Frozen matrices that are held rounded are among them, as what they stand for.
    """
    frozen = rounded_tensors(model) if torch.distributed.get_rank() == 0 else {}
    tensors = {MODEL: whole_tensors(model) | frozen}
    if average is not None:
        with average.in_place():
            # In one process the whole tensors are the model's own, which gets its own weights back.
            tensors[MODEL_AVERAGE] = {name: tensor.clone() for name, tensor in whole_tensors(model).items()} | frozen
    return tensors


def publish(out: Path, shape: Shape, tensors: dict[str, dict[str, Tensor]], record: Record) -> dict[str, Any]:
    """Write a training stage's models and record into its data folder; returns its last measurements."""
    for name, weights in tensors.items():
        save_model(out / name, shape, weights)
    record.publish(out)
    return final_measurements(record.lines())


def final_measurements(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last training loss, and the last validation, for a stage's summary."""
    losses = [line["loss"] for line in lines if "loss" in line]
    validations = [line["validation"] for line in lines if "validation" in line]
    averages = [line["validation_average"] for line in lines if "validation_average" in line]
    return {"first_loss": losses[0] if losses else None, "last_loss": losses[-1] if losses else None,
            **({"validation": validations[-1]} if validations else {}),
            **({"validation_average": averages[-1]} if averages else {})}
