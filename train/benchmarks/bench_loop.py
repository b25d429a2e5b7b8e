"""`gristmill bench train`, the whole loop: reading, spike statistics, records and clocks beside the bare arithmetic.

Both sides train the same sizes on the same tokens, with the same batch, precision, clipping and fused AdamW, from the
sixth step to the last; by turns, and the best turn of each counts.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.dataprep.context import Context
from gristmill.mixtures.model import Model
from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_writing import write_packed_set
from gristmill.train.loop.loop import Job, train
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape, shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.parallel.sharding import compute_dtype, sharded_model
from gristmill.train.parallel.single import single_process

VOCAB, LENGTH, ROWS = 4096, 256, 16
SECTION = Model(layers=4, width=128, heads=4)
STEPS, WARMUP_STEPS, TURNS = 20, 5, 3
LEARNING_RATE = 1e-3
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Seconds = float
Row = dict[str, Any]


def rows() -> Iterator[Row]:
    """Measure; `ratio` is ours over the peer's tokens per second."""
    shape = shape_of(SECTION, VOCAB, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        packed = _packed_set(Path(folder) / "mix")
        yield _row("loop_vs_plain", *_by_turns(shape, packed, plain_loop))
        if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
            yield {"name": "loop_vs_transformers", "ours": None, "peer": None, "unit": "tokens/s", "ratio": None,
                   "note": "transformers or accelerate is not installed"}
            return
        yield _row("loop_vs_transformers", *_by_turns(shape, packed, transformers_loop))


def our_loop(shape: Shape, packed: PackedSet) -> Seconds:
    """The loop as pre-training runs it, without validation and checkpoints."""
    clock = StepClock()
    section = Pretrain.model_validate({
        "steps": STEPS, "global_batch_size": ROWS, "micro_batch_size": ROWS, "log_every": 10,
        "schedule": {"kind": "constant", "warmup_steps": 0}, "optimizer": {"learning_rate": LEARNING_RATE}})
    with single_process() as world, tempfile.TemporaryDirectory() as work:
        model = sharded_model(shape, drawn(shape, 0), world, compute_dtype("auto", world.device))
        objective = NextToken(packed, 0, torch.full((VOCAB,), 4.0, device=world.device), shape)
        context = Context(Path(work), checkpoint_every=STEPS + 1, emit=lambda event: None)
        train(Job(section=section, objective=objective, model=model, world=world, context=context,
                  after_step=lambda step: clock.after(step)))
    _forget_ranks()
    return clock.seconds


def plain_loop(shape: Shape, packed: PackedSet) -> Seconds:
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
    return clock.seconds


def transformers_loop(shape: Shape, packed: PackedSet) -> Seconds:
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
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out, per_device_train_batch_size=ROWS, max_steps=STEPS, learning_rate=LEARNING_RATE,
            optim="adamw_torch_fused", max_grad_norm=1.0, logging_steps=10, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=device.type == "cpu", bf16=device.type == "cuda")
        trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[Clocked()])
        trainer.train()
    return clock.seconds


class StepClock:
    """The time from the end of the fifth step to the end of the last."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def after(self, step: int) -> None:
        """Take note that a step, counted from 1, is done."""
        if step in (WARMUP_STEPS, STEPS):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds, self._started = now - self._started, now


def _by_turns(
    shape: Shape, packed: PackedSet, peer: Callable[[Shape, PackedSet], Seconds]
) -> tuple[Seconds, Seconds]:
    turns = [(our_loop(shape, packed), peer(shape, packed)) for _ in range(TURNS)]
    ours, theirs = zip(*turns, strict=True)
    return min(ours), min(theirs)


def _row(name: str, ours: Seconds, peer: Seconds) -> Row:
    tokens = (STEPS - WARMUP_STEPS) * ROWS * LENGTH
    return {"name": name, "ours": tokens / ours, "peer": tokens / peer, "unit": "tokens/s", "ratio": peer / ours}


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
