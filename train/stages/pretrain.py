"""Stage `pretrain`: trains a new decoder or encoder on the packed set.

Output: `model/config.json`, `model/model.safetensors` (float32), `metrics.jsonl`,
`skipped_steps.jsonl`; `model-average/` if the section configures it, and `autopsies/`
of skipped steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from gristmill.core.files import as_path
from gristmill.core.stage_context import Context
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import PackedSetError
from gristmill.tokenize.row_provenance import known_of
from gristmill.train.distributed.fsdp import compute_dtype, sharded_model
from gristmill.train.distributed.process_groups import process_group
from gristmill.train.eval.held_out import Validation, read_token_bytes
from gristmill.train.eval.tasks import InLoopTasks
from gristmill.train.generation.language_model import with_tokenizer
from gristmill.train.loop.bad_steps import decoder
from gristmill.train.loop.batch_plan import plan_of
from gristmill.train.loop.prefetch import reading_threads
from gristmill.train.loop.throughput import Utilisation, peak_flops
from gristmill.train.loop.training_job import Job, Learner, Observers
from gristmill.train.models.encoder import new_encoder
from gristmill.train.models.model_config import (
    AnyShape,
    OwnShape,
    Shape,
    TransformersShape,
    shape_to_train,
)
from gristmill.train.models.transformers_decoder import ONE_BY_ONE
from gristmill.train.models.weights import (
    TensorOf,
    WeightsError,
    check_kind,
    drawn,
    read_shape,
    stored,
)
from gristmill.train.objectives.glm import blanks_of
from gristmill.train.objectives.goldfish import GoldfishMask
from gristmill.train.objectives.masked_rows import masking_of
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.prediction_targets import Layout
from gristmill.train.objectives.prefix_rows import PrefixCut
from gristmill.train.objectives.span_rows import corruption_of
from gristmill.train.stages.stage_inputs import Inputs, open_rows
from gristmill.train.stages.trained_models import (
    Measurements,
    ModelFigures,
    all_tensors,
    averaged,
    causal_share,
    describe_model,
    final_measurements,
    measuring,
    publish,
)
from gristmill.train.trainer import TrainingSummary, train


class PretrainSummary(TrainingSummary, ModelFigures, Measurements):
    """Summary of the stage.

    Attributes:
        dtype: of matrix products.
        world_size: number of processes.
    """

    dtype: str
    world_size: int


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> PretrainSummary:
    """Pre-train; called on every rank of a torchrun process group.

    Raises:
        gristmill.train.loop.stopping.StoppedError: SIGTERM was received; a rerun
            continues.
    """
    section = Pretrain.model_validate(config)
    seed = section.key_seed
    with (
        open_rows(inputs["mix"], context) as packed,
        held_out_rows_of(section, packed, context) as held_out,
    ):
        first, size = plan_of(section, packed.sequence_length).positions(
            section.steps - 1
        )
        packed.order(section.key_seed).check_reads(first + size)
        shape, tensor_of = starting_model(section, packed, seed)
        layout = read_layout(section, inputs["tokenizer"], seed, packed.sequence_length)
        length = packed.sequence_length
        with process_group(context.training.parallel) as world:
            dtype = compute_dtype(section.precision, world.device)
            model = sharded_model(
                shape, tensor_of, world, dtype, context.training.compute, section.float8
            )
            # an OwnShape now has its number of parameters
            shape = cast(AnyShape, model.shape)
            token_bytes = read_token_bytes(inputs["tokenizer"], world.device)
            if shape.document_mask and not getattr(model, "separates_documents", True):
                context.warn(ONE_BY_ONE)
            average = averaged(model, section)
            objective = NextToken(
                packed,
                seed,
                token_bytes,
                shape,
                section.z_loss,
                layout,
            )
            validation = Validation(
                section.validate_every,
                section.steps,
                held_out,
                model,
                average,
                token_bytes,
                world,
                None if section.goldfish is not None else layout,
            )
            tasks = InLoopTasks(
                section.tasks,
                with_tokenizer(model, inputs["tokenizer"], world),  # type: ignore[arg-type]
                section.evaluate_every or section.validate_every,
                section.steps,
            )
            observers = Observers(
                after_step=measuring(validation, tasks),
                decode=decoder(inputs["tokenizer"]),
                known=partial(known_of, packed, context.lineage.annotations)
                if context.lineage.annotations
                else None,
            )
            job = Job(
                section=section,
                learner=Learner(objective, model, average),
                world=world,
                context=context,
                observers=observers,
                packed=packed,
                reading_threads=reading_threads(packed.local, world.device),
                utilisation=Utilisation(
                    peak_flops(world.device, dtype), causal_share(shape, length)
                ),
            )
            if section.phases:
                observers = replace(
                    observers, before_step=partial(set_positions, model, shape, job)
                )
            record, summary = train(replace(job, observers=observers))
            set_positions(model, shape, job, summary["steps"] - 1)
            shape = cast(AnyShape, model.shape)
            tensors = all_tensors(model, average)
            if record is not None:
                publish(out, shape, tensors, record)
    return {
        **summary,
        **final_measurements(record),
        **describe_model(shape, length),
        "dtype": str(dtype).removeprefix("torch."),
        "world_size": world.size,
    }


def held_out_rows_of(
    section: Pretrain, packed: PackedSet, context: Context
) -> AbstractContextManager[PackedSet]:
    """Packed set whose held-out rows are measured: the section's, or the mixture.

    Raises:
        PackedSetError: its rows have another length or tokenizer than the mixture's.
    """
    if section.validation_set is None:
        return nullcontext(packed)
    other = PackedSet(section.validation_set, context.training.stream, context.warn)
    for key in ("sequence_length", "tokenizer"):
        if other.manifest[key] != packed.manifest[key]:  # type: ignore[literal-required]
            raise PackedSetError(
                f"pretrain.validation_set {section.validation_set}: its {key} is not "
                "that of the mixture; pack it with the same one"
            )
    return closing(other)


def read_layout(
    section: Pretrain, folder: Path, seed: int, length: int
) -> Layout | None:
    """Targets of rows of `length` tokens; None for next-token prediction.

    Raises:
        gristmill.train.objectives.span_rows.NoSentinelsError: the tokenizer lacks
            special tokens for hidden spans.
        gristmill.train.objectives.masked_rows.NoMaskTokenError: the tokenizer has no
            mask token.
    """
    spans = section.span_corruption or section.ul2
    if section.masked is not None:
        return masking_of(section.masked, load(folder), seed)
    if section.blank_infilling is not None:
        return blanks_of(section.blank_infilling, load(folder), seed, length)
    if spans is not None:
        return corruption_of(spans, load(folder), seed, length)
    if section.goldfish is not None:
        return GoldfishMask(section.goldfish)
    return None if section.prefix_lm is None else PrefixCut(section.prefix_lm, seed)


def starting_model(
    section: Pretrain, packed: PackedSet, seed: int
) -> tuple[AnyShape, TensorOf | None]:
    """Shape of the model to train, and the source of its first weights: random or a
    checkpoint; None for own models.

    Raises:
        WeightsError: the mixture's tokenizer has more ids than the checkpoint, or the
            checkpoint is a decoder and an encoder is to be trained, or the reverse.
        gristmill.train.models.hf_configs.UnknownArchitectureError: the checkpoint's
            architecture is not supported.
    """
    model = section.model
    vocab_size = packed.manifest["tokenizer"]["vocab_size"]
    if model.own is not None:
        return OwnShape(
            model.own, vocab_size, packed.sequence_length, model.document_mask, seed
        ), None
    if model.init_from is None:
        new_shape = shape_to_train if section.kind == "decoder" else new_encoder
        new = new_shape(section, vocab_size, packed.sequence_length)
        return new, drawn(new, seed, model.init, model.mup_base_width)
    folder = as_path(model.init_from)
    shape = read_shape(folder, model.implementation)
    check_kind(folder, shape, section.kind)
    if vocab_size > shape.vocab_size:
        raise WeightsError(
            f"pretrain.model.init_from {folder}: the model has {shape.vocab_size} "
            "ids, but the mixture "
            f"was tokenised with {vocab_size}; give its own tokenizer as tokenizer.path"
        )
    if isinstance(shape, TransformersShape):
        if section.reads_prefixes or any(
            phase.rope_theta or phase.rope_scaling for phase in section.phases
        ):
            raise WeightsError(
                f"pretrain.model.init_from {folder}: {shape.family} is computed by "
                "transformers, whose classes read from left to right at the positions of "
                "their config.json; remove prefix_lm, ul2, blank_infilling, and "
                "rope_theta and rope_scaling of phases"
            )
        return replace(
            shape,
            sequence_length=packed.sequence_length,
            document_mask=model.document_mask,
        ), stored(folder, model.implementation)
    return replace(
        shape,
        sequence_length=max(shape.sequence_length, packed.sequence_length),
        document_mask=model.document_mask,
        prefix_lm=section.reads_prefixes,
    ), stored(folder, model.implementation)


def set_positions(model: Any, shape: AnyShape, job: Job, step: int) -> None:
    """Set a decoder's rotary positions for the phase of a step, counted from 0.

    They depend on the step alone, so that resumed and rewound trainings agree with
    uninterrupted ones.

    Args:
        model: reads them from its shape in every forward pass.
        shape: without phases.
        job: the training, with its phases.
        step: counted from 0.
    """
    if isinstance(shape, Shape):
        phase = job.phase_of(step)
        rotary = {
            key: getattr(phase, key, None) for key in ("rope_theta", "rope_scaling")
        }
        model.shape = replace(
            shape,
            **{key: value for key, value in rotary.items() if value is not None},
        )
