"""One side of `loop.py`, in a process of its own: `python -m benchmarks.train.loop_sides SIDE FOLDER SETTING`.

A line on the standard input lets it train one step, which it answers with a line of JSON: the seconds that it took.
Whatever else it prints goes to the standard error.
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

from gristmill.core.stage_context import Context
from gristmill.mixtures.model import Model
from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.loop import Job, train
from gristmill.train.loop.prefetch import reading_threads
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.parallel.process_groups import single_process
from gristmill.train.parallel.sharding import compute_dtype, sharded_model

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """What all sides train.

    Attributes:
        layers, width, heads: of the model; 10.7 M parameters unless said otherwise, whose steps are long enough that it
            is the loop's that is measured, not that of a thousand tiny ones.
        vocab: ids.
        rows, length: of a batch, which is one micro-batch.
        warmup_steps: that are not counted.
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
        return shape_of(Model(layers=self.layers, width=self.width, heads=self.heads), self.vocab, self.length)


class Seconds(NamedTuple):
    """Of one step: the wall's, and of all threads of this process together."""

    wall: float
    process: float


class Turns:
    """Waits for its turn before every step, and answers after it."""

    def __init__(self, asks: IO[str], answers: IO[str]) -> None:
        self._asks, self._answers = asks, answers
        self._started = Seconds(0.0, 0.0)

    def wait(self) -> None:
        """Wait until it is this side's turn.

        Raises:
            SystemExit: nobody asks any more.
        """
        if not self._asks.readline():
            sys.exit(0)
        self._started = _now()

    def after(self, step: int) -> None:
        """Answer what a step (they are counted from 1) took, and wait for the next turn."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = _now()
        taken = Seconds(now.wall - self._started.wall, now.process - self._started.process)
        print(json.dumps(taken), file=self._answers, flush=True)
        self.wait()


def ours(packed: PackedSet, setting: Setting, turns: Turns) -> None:
    """The loop as pre-training runs it, without validation and checkpoints."""
    shape, steps = setting.shape(), setting.steps
    section = Pretrain.model_validate(
        {
            "steps": steps,
            "global_batch_size": setting.rows,
            "micro_batch_size": setting.rows,
            "log_every": setting.log_every,
            "schedule": {"kind": "constant", "warmup_steps": 0},
            "optimizer": {"learning_rate": LEARNING_RATE},
        }
    )
    with single_process() as world, tempfile.TemporaryDirectory() as work:
        model = sharded_model(shape, drawn(shape, 0), world, compute_dtype("auto", world.device))
        objective = NextToken(packed, 0, torch.full((setting.vocab,), 4.0, device=world.device), shape)
        context = Context(Path(work), checkpoint_every=steps + 1, emit=lambda event: None)
        train(
            Job(
                section=section,
                objective=objective,
                model=model,
                world=world,
                context=context,
                reading_threads=reading_threads(packed.local, world.device),
                after_step=turns.after,
            )
        )


def plain(packed: PackedSet, setting: Setting, turns: Turns) -> None:
    """The same model and loss in a loop of a few lines: neither sharding nor statistics nor records."""
    shape, device = setting.shape(), _device()
    model, dtype = Llama(shape).to(device), compute_dtype("auto", device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(shape, 0)(name, parameter.shape))
    for step, rows in enumerate(_batches(packed, setting), 1):
        ids = torch.from_numpy(packed.read(rows)).to(device)
        targets = next_tokens(ids)
        weights = torch.full(targets.shape, 1.0 / (setting.rows * (setting.length - 1)), device=device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss, _ = model(ids, lambda hidden, matrix, t=targets, w=weights: weighted_nll(hidden, matrix, t, w))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.after(step)


def transformers(packed: PackedSet, setting: Setting, turns: Turns) -> None:
    """transformers' Trainer on its own Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class OneByOne(TrainerCallback):  # type: ignore[misc]
        """Tells of every step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            turns.after(state.global_step)

    shape, device = setting.shape(), _device()
    rows = np.concatenate(list(_batches(packed, setting)))
    examples = [{"input_ids": row, "labels": row} for row in torch.from_numpy(packed.read(rows))]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.padded_vocab_size,
            hidden_size=shape.width,
            intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=setting.length,
            tie_word_embeddings=shape.tied_embeddings,
            use_cache=False,
        )
    )
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
        Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[OneByOne()]).train()


SIDES = {"ours": ours, "plain": plain, "transformers": transformers}


def _batches(packed: PackedSet, setting: Setting) -> np.ndarray:
    """Row numbers of each step, (steps, rows)."""
    order = np.random.default_rng(0).permutation(packed.rows)
    return order[: setting.steps * setting.rows].reshape(setting.steps, setting.rows)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


def main(side: str, folder: Path, setting: Setting) -> None:
    """Train one side, step by step as it is asked to."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    turns = Turns(sys.stdin, answers)
    turns.wait()
    SIDES[side](PackedSet(folder), setting, turns)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Setting(**json.loads(sys.argv[3])))
