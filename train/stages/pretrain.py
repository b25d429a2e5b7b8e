"""Stage `pretrain`: a new decoder, or encoder, learns the packed set.

Output: `model/config.json`, `model/model.safetensors` (float32), `metrics.jsonl`, `skipped_steps.jsonl`; where the
section asks for them or a step was skipped `model-average/` and `autopsies/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import as_path
from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.origins import known_of
from gristmill.tokenize.packed import PackedSet
from gristmill.train.evaluation.answering import InLoopTasks, open_reader
from gristmill.train.evaluation.held_out import Validation, read_token_bytes
from gristmill.train.loop.bad_steps import decoder
from gristmill.train.loop.loop import Job, train
from gristmill.train.loop.prefetch import reading_threads
from gristmill.train.loop.row_plan import plan_of
from gristmill.train.loop.throughput import peak_flops
from gristmill.train.models.multi_token import FURTHER, trunk_of
from gristmill.train.models.shape import OwnShape, Shape, further_heads, shape_in_phase, shape_to_train
from gristmill.train.models.weights import TensorOf, WeightsError, check_kind, drawn, read_shape, stored
from gristmill.train.objectives.blank_rows import read_blanks
from gristmill.train.objectives.layout import Layout
from gristmill.train.objectives.masked_rows import read_masking
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.prefix_rows import PrefixCut
from gristmill.train.objectives.span_rows import read_corruption
from gristmill.train.parallel.sharding import compute_dtype, sharded_model
from gristmill.train.parallel.world import process_group
from gristmill.train.stages.stage_inputs import open_rows
from gristmill.train.stages.trained_models import (
    all_tensors,
    averaged,
    causal_share,
    describe_model,
    publish,
)


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Pre-train; called on every rank of a torchrun process group.

    Raises:
        gristmill.train.loop.stopping.StoppedError: SIGTERM came; a rerun continues.
    """
    section = Pretrain.model_validate(config)
    seed = section.key_seed
    with open_rows(inputs["mix"], context) as packed:
        check_stages(packed, section)
        shape, tensor_of = starting_model(section, packed, seed)
        layout = read_layout(section, inputs["tokenizer"], seed, packed.sequence_length)
        length = packed.sequence_length
        with process_group(context.parallel) as world:
            dtype = compute_dtype(section.precision, world.device)
            model = sharded_model(shape, tensor_of, world, dtype, context.compute, section.float8)
            shape = cast(Shape | OwnShape, model.shape)  # with the number of a user's parameters
            token_bytes = read_token_bytes(inputs["tokenizer"], world.device)
            average = averaged(model, section)
            job = Job(
                section=section,
                model=model,
                world=world,
                context=context,
                peak_flops=peak_flops(world.device, dtype),
                causal_share=causal_share(shape, length),
                objective=NextToken(
                    packed,
                    seed,
                    token_bytes,
                    shape,
                    section.z_loss,
                    layout,
                    0.0 if section.multi_token is None else section.multi_token.weight,
                ),
                after_step=_InLoop(
                    Validation(
                        section.validate_every, section.steps, packed, model, average, token_bytes, world, layout
                    ),
                    InLoopTasks(
                        section.tasks,
                        open_reader(model, inputs["tokenizer"], world),  # type: ignore[arg-type]
                        section.evaluate_every or section.validate_every,
                        section.steps,
                    ),
                ),
                average=average,
                decode=decoder(inputs["tokenizer"]),
                known=partial(known_of, packed, context.origins) if context.origins else None,
                reading_threads=reading_threads(packed.local, world.device),
                phases=packed.described_phases(),
                phase_ends=packed.phase_ends(),
                sets_before=packed.sets_before(),
            )
            turn = _Positions(model, shape, job)
            record, summary = train(
                replace(job, before_step=lambda step, rows: turn.of_step(step)) if section.phases else job
            )
            turn.of_step(summary["steps"] - 1)
            shape = cast(Shape | OwnShape, model.shape)
            tensors = {
                folder: {name: tensor for name, tensor in weights.items() if not name.startswith(FURTHER)}
                for folder, weights in all_tensors(model, average).items()
            }
            kept = trunk_of(shape) if isinstance(shape, Shape) else shape
            if record is not None:
                summary |= publish(out, kept, tensors, record)
    return {
        **summary,
        **describe_model(kept, length),
        "flops_per_token": shape.flops_per_token(length),
        "dtype": str(dtype).removeprefix("torch."),
        "world_size": world.size,
    }


def check_stages(packed: PackedSet, section: Pretrain) -> None:
    """See that a training with these settings reads a set with phases no further than its end, before it begins.

    Raises:
        gristmill.tokenize.order.ReadOnceError: it would.
    """
    first, size = plan_of(section, packed.sequence_length).positions(section.steps - 1)
    packed.order(section.key_seed).check_reads(first + size)


def read_layout(section: Pretrain, tokenizer: Path, seed: int, length: int) -> Layout | None:
    """What is predicted of rows of so many tokens; None where the next token is.

    Raises:
        gristmill.train.objectives.span_rows.NoSentinelsError: it lacks special tokens for hidden spans.
        gristmill.train.objectives.masked_rows.NoMaskTokenError: the tokenizer of the folder has no token to mask by.
    """
    if section.masked is not None:
        return read_masking(section.masked, tokenizer, seed)
    if section.blank_infilling is not None:
        return read_blanks(section.blank_infilling, tokenizer, seed, length)
    spans = section.span_corruption or section.ul2
    if spans is not None:
        return read_corruption(spans, tokenizer, seed, length)
    return None if section.prefix_lm is None else PrefixCut(section.prefix_lm, seed)


def starting_model(section: Pretrain, packed: PackedSet, seed: int) -> tuple[Shape | OwnShape, TensorOf | None]:
    """The shape of the model to train, and where its first weights come from: drawn, or a checkpoint; a user's makes
    its own.

    Raises:
        WeightsError: the mixture's tokenizer has ids that the checkpoint does not, or the checkpoint is a decoder where
            an encoder is to be trained, or the reverse.
        gristmill.train.models.families.UnknownArchitectureError: no model here can run the checkpoint.
    """
    model, vocab_size = section.model, packed.manifest["tokenizer"]["vocab_size"]
    if model.own is not None:
        return OwnShape(model.own, vocab_size, packed.sequence_length, model.document_mask, seed), None
    if model.init_from is None:
        shape = shape_to_train(section, vocab_size, packed.sequence_length)
        return shape, drawn(shape, seed, model.init, model.mup_base_width)
    folder = as_path(model.init_from)
    shape = read_shape(folder)
    check_kind(folder, shape, section.kind)
    if vocab_size > shape.vocab_size:
        raise WeightsError(
            f"pretrain.model.init_from {folder}: the model has {shape.vocab_size} ids, but the mixture "
            f"was tokenised with {vocab_size}; give its own tokenizer as tokenizer.path"
        )
    if shape.bert and packed.sequence_length > shape.sequence_length:
        raise WeightsError(
            f"pretrain.model.init_from {folder}: the model has {shape.sequence_length} learned "
            f"positions, but rows have {packed.sequence_length} tokens; say mix.sequence_length: "
            f"{shape.sequence_length}"
        )
    length = max(shape.sequence_length, packed.sequence_length)
    found = replace(
        shape,
        sequence_length=length,
        document_mask=model.document_mask,
        prefix_lm=section.reads_prefixes,
        multi_token=further_heads(section),
    )
    new, old = drawn(found, seed), stored(folder)
    return found, lambda name, size: (new if name.startswith(FURTHER) else old)(name, size)


class _Positions:
    """Gives a decoder the rotary positions of the phase that a step belongs to: of the step alone, so that a resumed
    training, or one that went back, has those of the uninterrupted one.

    Args:
        model: which reads them of its shape in every forward pass.
        shape: as it was without phases.
        job: the training, which knows them.
    """

    def __init__(self, model: Any, shape: Shape | OwnShape, job: Job) -> None:
        self._model, self._shape, self._job = model, shape, job

    def of_step(self, step: int) -> None:
        """Before a step, counted from 0."""
        if isinstance(self._shape, Shape):
            self._model.shape = shape_in_phase(self._shape, self._job.phase_of(step))


class _InLoop:
    """What is measured between steps: held-out rows and tasks, each at its own steps, on one line."""

    def __init__(self, validation: Validation, tasks: InLoopTasks) -> None:
        self._validation, self._tasks = validation, tasks

    def __call__(self, step: int) -> dict[str, Any] | None:
        answered = self._tasks(step)
        line = {**(self._validation(step) or {}), **({"tasks": answered} if answered else {})}
        return line or None
