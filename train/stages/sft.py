"""Stage `sft`: supervised fine-tuning on conversations, where the loss covers only
tokens of the data's masks, or on texts with a class.

Output: `model/`, `metrics.jsonl`, `skipped_steps.jsonl`, as of pre-training;
`examples.txt`: the examples of each row, and `rows-per-set.json`; `step-0.json`:
results of the checks before the first step; with `lora` also `adapter/`, which PEFT
loads, and `model/` is the model with the adapters merged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gristmill.core.files import read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.posttraining import Distill, Tuning
from gristmill.train.data.conversation_tokens import Chat, write_example_ids
from gristmill.train.data.example_rows import piece_ids
from gristmill.train.data.labelled_texts import CLASSES
from gristmill.train.distributed.process_groups import World
from gristmill.train.eval.held_out import read_token_bytes
from gristmill.train.loop.bad_steps import decoder
from gristmill.train.loop.objective import Metrics
from gristmill.train.loop.prefetch import reading_threads
from gristmill.train.loop.step import summed_losses
from gristmill.train.loop.training_job import Learner, Observers
from gristmill.train.models.encoder import classifier_shape
from gristmill.train.models.model_config import StoredShape
from gristmill.train.models.weights import with_new_head
from gristmill.train.objectives.decoded_answers import DecodedAnswers
from gristmill.train.objectives.distillation import (
    TaughtTurns,
    teacher_key,
)
from gristmill.train.objectives.labelled_texts import LabelledTexts
from gristmill.train.objectives.preflight_checks import CERTIFICATE, Certificate, prove
from gristmill.train.objectives.reference_logps import check_key
from gristmill.train.objectives.sft import AssistantTurns
from gristmill.train.resuming import measured_once
from gristmill.train.stages.sft_data import HELD_OUT
from gristmill.train.stages.stage_inputs import (
    Inputs,
    first_model,
    open_rows,
)
from gristmill.train.stages.teacher import kept_ids, teacher_folder
from gristmill.train.stages.trained_models import (
    TunedSummary,
    averaged,
    tune,
    tuning,
)

HELD_OUT_BEFORE = "held-out-before.json"
"""Working file: the loss on held-out conversations before the first step."""


class SftSummary(TunedSummary):
    """Summary of the stage.

    Attributes:
        rows: number of rows of the training set.
        step_0: measurements before the first step.
        held_out, held_out_before: metrics of held-out conversations, or texts, at the
            end and at the start; None without any.
    """

    rows: int
    step_0: Certificate
    held_out: Metrics | None
    held_out_before: Metrics | None


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> SftSummary:
    """Fine-tune the pre-trained model, or train a classifier from it; called on every
    rank of a torchrun process group.

    Raises:
        gristmill.train.objectives.preflight_checks.NotProvedError: a check before the
            first step fails.
        gristmill.train.loop.stopping.StoppedError: SIGTERM was received; a rerun
            continues.
    """
    section = Tuning.model_validate(config)
    start = first_model(inputs)
    with (
        ExitStack() as stack,
        open_rows(inputs["sft_data"], context) as rows,
        tuning(inputs, section, start, rows.sequence_length, out, context) as setup,
    ):
        classes = inputs["sft_data"] / CLASSES
        make_turns: Callable[..., AssistantTurns] = AssistantTurns
        if classes.exists():
            names = read_json(classes)
            make_turns = partial(LabelledTexts, names)
            shape = classifier_shape(setup.shape, names)
            new = with_new_head(start, shape, section.key_seed)
            # A classifier has no loss on text.
            setup = replace(setup, shape=shape, tensor_of=new, packed=None)
        elif setup.shape.kind == "encoder_decoder":
            make_turns = DecodedAnswers
            setup = replace(setup, packed=None)
        world = setup.world
        model = setup.model()
        flops = setup.flops_per_token
        token_bytes = read_token_bytes(inputs["tokenizer"], world.device)
        arguments = (rows, section.key_seed, token_bytes, flops)
        objective = student_objective = make_turns(*arguments)
        section = section.in_steps(objective.order.total)
        if world.is_first:
            ids = piece_ids(rows, np.arange(rows.rows, dtype=np.int64))
            examples = [" ".join(map(bytes.hex, ids[row])) for row in range(rows.rows)]
            write_example_ids(out, examples, rows.rows_per_source)
        if section.distill is not None:
            check_teacher(
                section.distill,
                objective.fingerprint,
                inputs,
                setup.dtype,
                setup.shape,
            )
            student_objective = TaughtTurns(
                inputs["teacher"], section.distill, *arguments
            )
        certificate = measured_once(
            context.work / CERTIFICATE,
            world,
            lambda: prove(
                model,
                objective,
                setup.dtype,
                section.micro_batch_size,
                world,
            ),
        )
        before = None
        observers = Observers(decode=decoder(inputs["tokenizer"]))
        if (inputs["sft_data"] / HELD_OUT).exists():
            held_out_rows = stack.enter_context(
                open_rows(inputs["sft_data"] / HELD_OUT, context)
            )
            turns = HeldOutTurns(
                section.validate_every,
                section.steps,
                make_turns(held_out_rows, section.key_seed, token_bytes, flops),
                section.micro_batch_size,
                model,
                world,
            )
            before = measured_once(context.work / HELD_OUT_BEFORE, world, turns.measure)
            observers = replace(observers, after_step=turns)
        record, summary = tune(
            replace(setup, section=section),
            Learner(student_objective, model, averaged(model, section)),
            observers,
            reading_threads(rows.local, world.device),
        )
        after = None
        if record is not None:
            write_json(out / CERTIFICATE, certificate)
            for line in record.lines():
                after = line.get("held_out", after)
    return {
        **summary,
        "rows": rows.rows,
        "step_0": certificate,
        "held_out": after,
        "held_out_before": before,
    }


def check_teacher(
    distill: Distill,
    rows: str,
    inputs: Inputs,
    dtype: torch.dtype,
    student: StoredShape,
) -> None:
    """Check the stored predictions of the stage `teacher` on the rows of a fingerprint.

    Raises:
        gristmill.train.objectives.reference_logps.StaleReferenceError: the predictions
            are of other weights or rows, or of another vocabulary than the student's.
    """
    check_key(
        inputs["teacher"],
        teacher_key(
            teacher_folder(distill, inputs),
            Chat(inputs["tokenizer"]),
            rows,
            dtype,
            distill.temperature,
            kept_ids(distill, student.vocab_size),
            student.vocab_size,
        ),
        "teacher's distributions",
        "teacher",
    )


@dataclass(frozen=True)
class HeldOutTurns:
    """Measures held-out conversations after some steps and after the last.

    Attributes:
        every: steps between measurements; None: only after the last.
        steps: of the whole training.
        turns: the held-out rows.
        micro_batch_size: most rows of a forward pass on one rank.
        model: sharded.
        world: the processes.
    """

    every: int | None
    steps: int
    turns: AssistantTurns
    micro_batch_size: int
    model: nn.Module
    world: World

    def __call__(self, step: int) -> Metrics | None:
        """`held_out`: loss per trained token and bits per byte, in total and per set;
        None after a step without measurement.
        """
        if step != self.steps and step % (self.every or self.steps):
            return None
        return {"held_out": self.measure()}

    def measure(self) -> Metrics:
        """Measure the current loss; called on every rank."""
        rows = np.arange(self.turns.packed.rows, dtype=np.int64)
        shares = self.world.micro_batches(rows, self.micro_batch_size)
        parts = map(self.turns.prepare, shares)
        sums = summed_losses(self.model, self.turns, parts, self.world)
        return self.turns.report(sums, self.turns.weight(rows))
