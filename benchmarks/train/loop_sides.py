"""A side of `loop.py`, in a process of its own: `python -m benchmarks.train.loop_sides
SIDE FOLDER SETTING`.

For each line on standard input it trains a step, and answers with a line of JSON: the
seconds of the step. All other output goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from benchmarks.train.small_models import (
    drawn_decoder,
    hf_llama,
    next_token,
    pretrain_section,
)
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import TrainingEngine
from gristmill.mixtures.schema.model import Model
from gristmill.tokenize.packed import PackedSet
from gristmill.train.distributed.fsdp import compute_dtype, sharded_model
from gristmill.train.distributed.process_groups import single_process
from gristmill.train.loop.prefetch import reading_threads
from gristmill.train.loop.training_job import Job, Learner, Observers
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.trainer import train

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """The training of all sides.

    Attributes:
        layers, width, heads: of the model; 10.7 M parameters, so that a step takes much
            longer than launching its kernels.
        vocab: number of ids.
        rows, length: of a batch, which is one micro-batch.
        warmup_steps: first steps, which do not count.
        steps: all of them.
        log_every: steps between two lines of metrics.
    """

    layers: int = 6
    width: int = 320
    heads: int = 5
    vocab: int = 8192
    rows: int = 4
    length: int = 512
    warmup_steps: int = 2
    steps: int = 12
    log_every: int = 10

    def shape(self) -> Shape:
        """The model's sizes."""
        return shape_of(
            Model(layers=self.layers, width=self.width, heads=self.heads),
            self.vocab,
            self.length,
        )


class Seconds(NamedTuple):
    """Seconds of a step: by the wall clock, and of all threads of this process."""

    wall: float
    process: float


class Turns:
    """The protocol of turns: wait before every step, and answer after it."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers
        self._started = Seconds(0.0, 0.0)

    def wait(self) -> None:
        """Wait for this side's turn.

        Raises:
            SystemExit: the requests have ended.
        """
        if not self._requests.readline():
            sys.exit(0)
        self._started = _now()

    def after(self, step: int) -> None:
        """Answer with the seconds of a step, counted from 1, and wait for the next
        turn.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = _now()
        taken = Seconds(
            now.wall - self._started.wall, now.process - self._started.process
        )
        print(json.dumps(taken), file=self._answers, flush=True)
        self.wait()


def ours(packed: PackedSet, setting: Setting, turns: Turns) -> None:
    """Run the loop of pre-training, without validation and checkpoints."""
    shape = setting.shape()
    with single_process() as world, tempfile.TemporaryDirectory() as work:
        train(
            Job(
                section=pretrain_section(
                    setting.steps,
                    setting.rows,
                    setting.rows,
                    setting.log_every,
                    LEARNING_RATE,
                ),
                learner=Learner(
                    next_token(packed, shape, world.device),
                    sharded_model(
                        shape,
                        drawn(shape, 0),
                        world,
                        compute_dtype("auto", world.device),
                    ),
                ),
                world=world,
                context=Context(
                    Path(work),
                    training=TrainingEngine(checkpoint_every=setting.steps + 1),
                    emit=lambda event: None,
                ),
                observers=Observers(after_step=turns.after),
                reading_threads=reading_threads(packed.local, world.device),
            )
        )


def plain(packed: PackedSet, setting: Setting, turns: Turns) -> None:
    """Run the same model and loss in a loop of a few lines: no sharding, no statistics,
    no records.
    """
    device = _device()
    model, dtype = (
        drawn_decoder(setting.shape()).to(device),
        compute_dtype("auto", device),
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )
    for step, rows in enumerate(_batches(packed, setting), 1):
        ids = torch.from_numpy(packed.read(rows)).to(device)
        targets = next_tokens(ids)
        weights = torch.full(
            targets.shape, 1.0 / (setting.rows * (setting.length - 1)), device=device
        )
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss, _ = model(
                ids,
                lambda hidden, matrix, t=targets, w=weights: weighted_nll(
                    hidden, matrix, t, w
                ),
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.after(step)


def transformers(packed: PackedSet, setting: Setting, turns: Turns) -> None:
    """Run transformers' Trainer on its own Llama of the same sizes."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Answer(TrainerCallback):  # type: ignore[misc]
        """Answers after every step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            turns.after(state.global_step)

    device = _device()
    rows = np.concatenate(list(_batches(packed, setting)))
    examples = [
        {"input_ids": row, "labels": row} for row in torch.from_numpy(packed.read(rows))
    ]
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=setting.rows,
            max_steps=setting.steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            adam_beta2=0.95,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            logging_steps=setting.log_every,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            bf16=device.type == "cuda",
        )
        model = hf_llama(setting.shape(), setting.length)
        Trainer(
            model=model, args=arguments, train_dataset=examples, callbacks=[Answer()]
        ).train()


SIDES = {"ours": ours, "plain": plain, "transformers": transformers}


def _batches(packed: PackedSet, setting: Setting) -> np.ndarray:
    """Return the row numbers of each step, (steps, rows)."""
    order = np.random.default_rng(0).permutation(packed.rows)
    return order[: setting.steps * setting.rows].reshape(setting.steps, setting.rows)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


def main(side: str, folder: Path, setting: Setting) -> None:
    """Train a side, a step for each request."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    turns = Turns(sys.stdin, answers)
    turns.wait()
    SIDES[side](PackedSet(folder), setting, turns)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Setting(**json.loads(sys.argv[3])))
