"""`gristmill bench train`, the whole loop: reading, spike statistics, records and clocks beside the bare arithmetic.

All sides train the same sizes on the same tokens, with the same batch, precision, clipping, fused AdamW and number of
logged lines. They take turns, in another order each round, with the same number of threads, which sleep where they
wait; a ratio is the median over the rounds, by the wall's clock, and the one by the process's time is in the note.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gristmill.dataprep.context import Context
from gristmill.mixtures.model import Model
from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_writing import write_packed_set
from gristmill.train.loop.batches import reading_threads
from gristmill.train.loop.loop import Job, train
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape, shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.parallel.sharding import compute_dtype, sharded_model
from gristmill.train.parallel.single import single_process

VOCAB, LENGTH, ROWS = 8192, 512, 4
SECTION = Model(layers=6, width=320, heads=5)
"""10.7 M parameters: a step is long enough that it is the loop's that is measured, not that of a thousand tiny ones."""
STEPS, WARMUP_STEPS, ROUNDS = 10, 2, 6
LOG_EVERY = 10
LEARNING_RATE = 1e-3
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Row = dict[str, Any]


class Time(NamedTuple):
    """Of the steps after the first ones, in seconds: the wall's, and of all threads of this process together."""

    wall: float
    process: float


Side = Callable[[Shape, PackedSet], Time]


def rows() -> Iterator[Row]:
    """Measure in a process of its own, whose threads do not spin while they wait; see `measured_rows`."""
    done = subprocess.run([sys.executable, "-m", "gristmill.train.benchmarks.bench_loop"], check=False, text=True,
                          capture_output=True, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    if done.returncode != 0:
        raise RuntimeError(f"the loop could not be measured: {done.stderr[-4000:]}")
    yield from json.loads(done.stdout.splitlines()[-1])


def measured_rows() -> list[Row]:
    """`ratio` is ours over the peer's tokens per second."""
    sides: dict[str, Side] = {"ours": our_loop, "plain": plain_loop}
    if (has_peer := all(map(importlib.util.find_spec, ("transformers", "accelerate")))):
        sides["transformers"] = transformers_loop
    shape = shape_of(SECTION, VOCAB, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        times = _by_turns(sides, shape, _packed_set(Path(folder) / "mix"))
    found = [_row("loop_vs_plain", times["ours"], times["plain"])]
    found.append(_row("loop_vs_transformers", times["ours"], times["transformers"]) if has_peer else {
        "name": "loop_vs_transformers", "ours": None, "peer": None, "unit": "tokens/s", "ratio": None,
        "note": "transformers or accelerate is not installed"})
    return found


def our_loop(shape: Shape, packed: PackedSet) -> Time:
    """The loop as pre-training runs it, without validation and checkpoints."""
    clock = StepClock()
    section = Pretrain.model_validate({
        "steps": STEPS, "global_batch_size": ROWS, "micro_batch_size": ROWS, "log_every": LOG_EVERY,
        "schedule": {"kind": "constant", "warmup_steps": 0}, "optimizer": {"learning_rate": LEARNING_RATE}})
    with single_process() as world, tempfile.TemporaryDirectory() as work:
        model = sharded_model(shape, drawn(shape, 0), world, compute_dtype("auto", world.device))
        objective = NextToken(packed, 0, torch.full((VOCAB,), 4.0, device=world.device), shape)
        context = Context(Path(work), checkpoint_every=STEPS + 1, emit=lambda event: None)
        train(Job(section=section, objective=objective, model=model, world=world, context=context,
                  reading_threads=reading_threads(packed.local, world.device),
                  after_step=lambda step: clock.after(step)))
    _forget_ranks()
    return clock.taken


def plain_loop(shape: Shape, packed: PackedSet) -> Time:
    """The same model and loss in a loop of a few lines: neither sharding nor statistics nor records."""
    device, clock = _device(), StepClock()
    model = Llama(shape).to(device)
    dtype = compute_dtype("auto", device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    order = np.random.default_rng(0).permutation(packed.rows)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(shape, 0)(name, parameter.shape))
    for step in range(STEPS):
        ids = torch.from_numpy(packed.read(order[step * ROWS : (step + 1) * ROWS])).to(device)
        targets = next_tokens(ids)
        weights = torch.full(targets.shape, 1.0 / (ROWS * (LENGTH - 1)), device=device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss, _ = model(ids, lambda hidden, matrix, t=targets, w=weights: weighted_nll(hidden, matrix, t, w))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.after(step + 1)
    return clock.taken


def transformers_loop(shape: Shape, packed: PackedSet) -> Time:
    """transformers' Trainer on its own Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    clock, device = StepClock(), _device()

    class Clocked(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            clock.after(state.global_step)

    order = np.random.default_rng(0).permutation(packed.rows)
    examples = [{"input_ids": row, "labels": row} for row in torch.from_numpy(packed.read(order))]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=shape.padded_vocab_size, hidden_size=shape.width, intermediate_size=shape.ffn_width,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=LENGTH, tie_word_embeddings=shape.tied_embeddings, use_cache=False))
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            output_dir=out, per_device_train_batch_size=ROWS, max_steps=STEPS, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", weight_decay=0.1, adam_beta2=0.95, optim="adamw_torch_fused",
            max_grad_norm=1.0, logging_steps=LOG_EVERY, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=device.type == "cpu", bf16=device.type == "cuda")
        trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[Clocked()])
        trainer.train()
    return clock.taken


class StepClock:
    """The time from the end of the first steps, which are not counted, to the end of the last."""

    def __init__(self) -> None:
        self.taken = Time(0.0, 0.0)
        self._started = Time(0.0, 0.0)

    def after(self, step: int) -> None:
        """Take note that a step, counted from 1, is done."""
        if step in (WARMUP_STEPS, STEPS):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = Time(time.perf_counter(), time.process_time())
            self.taken = Time(now.wall - self._started.wall, now.process - self._started.process)
            self._started = now


def _by_turns(sides: dict[str, Side], shape: Shape, packed: PackedSet) -> dict[str, list[Time]]:
    """Times of each side, round by round; each round begins with another side."""
    threads, names = torch.get_num_threads(), list(sides)
    times: dict[str, list[Time]] = {name: [] for name in names}
    for number in range(ROUNDS):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            torch.set_num_threads(threads)
            times[name].append(sides[name](shape, packed))
    return times


def _row(name: str, ours: list[Time], peer: list[Time]) -> Row:
    tokens = (STEPS - WARMUP_STEPS) * ROWS * LENGTH
    rounds = list(zip(ours, peer, strict=True))
    by_process = statistics.median(theirs.process / mine.process for mine, theirs in rounds)
    return {"name": name, "ours": tokens / min(one.wall for one in ours),
            "peer": tokens / min(one.wall for one in peer), "unit": "tokens/s",
            "ratio": statistics.median(theirs.wall / mine.wall for mine, theirs in rounds),
            "note": f"median of {len(rounds)} rounds; by process time {by_process:.3f}"}


def _packed_set(folder: Path) -> PackedSet:
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS * STEPS, LENGTH))
    write_packed_set(folder, ids, {"all": len(ids)}, {"vocab_size": VOCAB, "eos": 0, "pad": 1, "sha256": ""})
    return PackedSet(folder)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _forget_ranks() -> None:
    """What a group of one leaves in the environment, which accelerate would take for a launch of its own."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


if __name__ == "__main__":
    print(json.dumps(measured_rows()))
