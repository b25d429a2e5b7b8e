"""Stage `teacher`: a larger model's predictions at every trained token of the
fine-tuning rows, computed once.

Output: the files of `objectives/distillation.py`, and `key.json`, the inputs that they
depend on. The key holds neither divergence nor weight, so changing them recomputes
nothing.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.core.files import as_path, write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.posttraining import Teach, TeacherKeys
from gristmill.train.data.conversation_tokens import TOKENIZER_FILE, Chat
from gristmill.train.distributed.fsdp import compute_dtype, evaluating, sharded_model
from gristmill.train.distributed.process_groups import (
    agree,
    process_group,
    sum_over_ranks,
)
from gristmill.train.eval.held_out import read_token_bytes
from gristmill.train.models.model_config import StoredShape
from gristmill.train.models.weights import SHAPE_FILE, read_shape, stored
from gristmill.train.objectives.distillation import (
    Taught,
    TeacherFiles,
    kept_of,
    teacher_key,
)
from gristmill.train.objectives.losses import IGNORED, Output, Values, of_logits
from gristmill.train.objectives.reference_logps import KEY, PredictionKey
from gristmill.train.objectives.sft import AssistantTurns
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.stages.stage_inputs import MODEL, Inputs, open_rows
from gristmill.train.stages.trained_models import ModelFigures, describe_model


class TeacherError(ValueError):
    """The model cannot teach this run's student."""


class TeacherSummary(ModelFigures):
    """Summary of the stage.

    Attributes:
        teacher: as configured.
        tokens: number of trained tokens.
        key: see distillation.teacher_key.
        loss: of the teacher, per trained token.
        rest_mass: mean probability of ids that are not stored.
        temperature, top_k: of the stored distributions; `all` ids, or their number.
    """

    teacher: str
    tokens: int
    key: PredictionKey
    loss: float
    rest_mass: float
    temperature: float
    top_k: int | str


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> TeacherSummary:
    """Store a teacher's distributions; called on every rank of a torchrun process
    group.

    Raises:
        TeacherError: the model is missing, or its vocabulary is not the run's.
    """
    section = Teach.model_validate(config)
    folder = teacher_folder(section, inputs)
    chat = Chat(inputs["tokenizer"])
    shape = read_teacher("sft.distill.teacher", folder, chat)
    with (
        open_rows(inputs["sft_data"], context) as packed,
        process_group(context.training.parallel, split_rows=False) as world,
    ):
        if context.mirroring.per_host:
            raise TeacherError(
                "all processes write what a teacher predicts into the same files, "
                "which hosts whose store is no folder do not share; make this stage on "
                "one of them: engine.nodes=1 (and engine.ranks, where it has fewer "
                "GPUs); later stages can have several again"
            )
        if world.is_first and shape.sequence_length < packed.sequence_length:
            context.warn(
                f"sft.distill.teacher {folder} was trained on rows of "
                f"{shape.sequence_length} tokens, but those of sft have "
                f"{packed.sequence_length}: its predictions beyond that may be worse"
            )
        dtype = compute_dtype(section.precision, world.device)
        objective = AssistantTurns(
            packed,
            0,
            read_token_bytes(inputs["tokenizer"], world.device),
            flops_per_token(shape, packed.sequence_length).whole,
        )
        kept = kept_ids(section, shape.vocab_size)
        key = teacher_key(
            folder,
            chat,
            objective.fingerprint,
            dtype,
            section.temperature,
            kept,
            shape.vocab_size,
        )
        if world.is_first:
            TeacherFiles.create(
                out, objective.masks, kept or shape.vocab_size, kept is not None
            )
        agree(None, world)  # the files exist before any process opens them
        model = sharded_model(
            shape, stored(folder), world, dtype, context.training.compute
        )
        files = TeacherFiles(out, objective.masks, "r+")
        sums = torch.zeros(3, dtype=torch.float64, device=world.device)
        rows = np.arange(objective.order.total, dtype=np.int64)
        with evaluating(model):
            for batch in world.micro_batches(rows, section.micro_batch_size):
                turns, targets, _ = objective.place(objective.prepare(batch))
                head = partial(
                    distributions,
                    targets=targets,
                    temperature=section.temperature,
                    top_k=kept,
                )
                taught, label_nll = model(turns.ids, head, positions=turns.positions)
                if len(batch) and world.counts:
                    files.write(batch, taught)
                    sums[0] += label_nll.double().sum()
                    sums[2] += len(label_nll)
                    if taught.rest is not None:
                        sums[1] += taught.rest.exp().double().sum()
        files.close()
        nll, rest_mass, tokens = sum_over_ranks(sums, world).tolist()
        if world.is_first:
            write_json(out / KEY, key)
    return {
        **describe_model(shape, packed.sequence_length),
        "teacher": str(section.teacher),
        "tokens": int(tokens),
        "key": key,
        "loss": nll / tokens,
        "rest_mass": rest_mass / tokens,
        "temperature": section.temperature,
        "top_k": "all" if kept is None else kept,
    }


def teacher_folder(section: TeacherKeys, inputs: Inputs) -> Path:
    """Folder of the teacher.

    Raises:
        TeacherError: see `model_folder`.
    """
    if section.teacher == "pretrain":
        return inputs["pretrain"] / MODEL
    return model_folder("sft.distill.teacher", section.teacher)


def model_folder(key: str, path: str) -> Path:
    """Folder of a model that a setting names.

    Raises:
        TeacherError: the folder has no model.
    """
    folder = as_path(path)
    if not (folder / SHAPE_FILE).exists():
        raise TeacherError(
            f"{key}: {folder} has no {SHAPE_FILE}; give the folder of a "
            "model, such as one that `export` wrote or that transformers loads"
        )
    return folder


def kept_ids(section: TeacherKeys, vocab_size: int) -> int | None:
    """Number of ids stored per token; None for all."""
    return (
        None if section.top_k == "all" or section.top_k >= vocab_size else section.top_k
    )


def read_teacher(key: str, folder: Path, chat: Chat) -> StoredShape:
    """Read the shape of a teacher, and check that its vocabulary is the run's.

    Args:
        key: the setting with its folder, for messages.
        folder: of the teacher.
        chat: the run's tokenizer.

    Raises:
        TeacherError: it predicts another number of ids, or its tokenizer gives another
            id to some token.
    """
    shape = read_shape(folder)
    if shape.vocab_size != (vocab_size := chat.tokenizer.get_vocab_size()):
        raise TeacherError(
            f"{key}: {folder} predicts {shape.vocab_size} ids, but the "
            f"run's tokenizer has {vocab_size}; a teacher needs the same vocabulary: "
            "give its tokenizer as tokenizer.path, or take another teacher"
        )
    if not (folder / TOKENIZER_FILE).exists():
        return shape
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_str(
        (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    ).get_vocab()
    ours = chat.tokenizer.get_vocab()
    if differing := sorted(
        token
        for token in theirs.keys() | ours.keys()
        if theirs.get(token) != ours.get(token)
    ):
        token = differing[0]
        raise TeacherError(
            f"{key}: {folder / TOKENIZER_FILE} gives {len(differing)} tokens another "
            f"id than the run's tokenizer does, among them {json.dumps(token)} "
            f"({theirs.get(token)}, not {ours.get(token)}); a teacher needs the same "
            "vocabulary: give its tokenizer as tokenizer.path, or take another teacher"
        )
    return shape


def distributions(
    hidden: Tensor,
    matrix: Output,
    targets: Tensor,
    temperature: float,
    top_k: int | None,
) -> tuple[Taught, Tensor]:
    """Stored part of the distributions over m tokens that have a target, row by row,
    and the targets' nll (m,).
    """
    flat = hidden.flatten(0, 1)[(targets != IGNORED).flatten()]
    labels = targets[targets != IGNORED]

    def stored_part(logits: Tensor, part: slice) -> Values:
        taught = kept_of(logits, temperature, top_k)
        nll = F.cross_entropy(logits, labels[part], reduction="none")
        if taught.ids is None or taught.rest is None:
            return nll, taught.logps
        return nll, taught.logps, taught.ids, taught.rest

    nll, *parts = of_logits(flat, matrix, stored_part)
    return Taught(*parts), nll
