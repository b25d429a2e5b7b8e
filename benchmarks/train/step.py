"""`gristmill bench train`: a whole training step and generation, against transformers'
Llama and plain matmul.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch._functorch.config as compiler
from torch import Tensor

from benchmarks.measuring import Row, row
from benchmarks.train.small_models import (
    Action,
    drawn_decoder,
    hf_llama,
    hf_step,
    our_step,
    per_second,
    random_packed_set,
    saved_tensors,
)
from gristmill.mixtures.schema.engine import Compute
from gristmill.mixtures.schema.model import Model
from gristmill.train.distributed.fsdp import compute_dtype
from gristmill.train.distributed.process_groups import World, single_process
from gristmill.train.generation.scheduler import generate
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import configure

VOCAB, LENGTH, ROWS = 4096, 256, 16
SECTION = Model(layers=4, width=128, heads=4)
MATMUL = 2048
NEW_TOKENS = 64
SMALL_VOCAB, SMALL_LENGTH, SMALL_ROWS = 128, 64, 4
SMALL = Model(layers=1, width=64, heads=4)
BUDGETS = (0.5, 0.0)


def rows() -> Iterator[Row]:
    """Measure speed and memory."""
    yield from speed_rows()
    yield from memory_rows()


def speed_rows() -> Iterator[Row]:
    """Measure tokens and arithmetic per second."""
    shape = shape_of(SECTION, VOCAB, LENGTH)
    with single_process() as world, tempfile.TemporaryDirectory() as folder:
        step = our_step(
            shape,
            random_packed_set(Path(folder), VOCAB, ROWS * 4, LENGTH),
            None,
            world,
            ROWS,
        )
        ids = torch.randint(0, VOCAB, (ROWS, LENGTH), device=world.device)
        peer_step = hf_step(
            hf_llama(shape, LENGTH), world, lambda: {"input_ids": ids, "labels": ids}
        )
        ours, peer = per_second(ROWS * LENGTH, world, step, peer_step)
        # 1.19, 2026-11-22, 2 cores
        yield row(
            "training step, vs transformers Llama", ours, peer, "tokens/s", floor=1.0
        )
        matrix = torch.randn(
            MATMUL,
            MATMUL,
            device=world.device,
            dtype=compute_dtype("auto", world.device),
        )
        steps, products = per_second(1, world, step, lambda: matrix @ matrix)
        arithmetic = steps * ROWS * LENGTH * shape.flops_per_token(LENGTH)
        # 0.43, 2026-11-28, 2 cores
        yield row(
            "model arithmetic, vs plain matmul",
            arithmetic / 1e9,
            products * 2 * MATMUL**3 / 1e9,
            "GFLOP/s",
            floor=0.35,
        )
        ours, peer = per_second(ROWS * NEW_TOKENS, world, *generations(shape, world))
        # 1.05, 2026-11-22, 2 cores
        yield row(
            "generation, vs transformers Llama", ours, peer, "tokens/s", floor=0.9
        )


def generations(shape: Shape, world: World) -> tuple[Action, Action]:
    """Return greedy generation for a batch of prompts: ours, and transformers'
    `generate`.
    """
    ours = drawn_decoder(shape).to(world.device)
    peer = hf_llama(shape, LENGTH, use_cache=True).to(world.device).eval()
    prompts = torch.randint(6, VOCAB, (ROWS, 32), device=world.device)
    mask = torch.ones_like(prompts)
    return (
        lambda: generate(ours, prompts.tolist(), NEW_TOKENS, ()),
        lambda: peer.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=1,
        ),
    )


class Step(NamedTuple):
    """A forward and backward pass.

    Attributes:
        saved_bytes: of tensors saved for the backward pass, weights not counted.
        loss: a scalar.
        gradients: of all weights, concatenated.
    """

    saved_bytes: int
    loss: Tensor
    gradients: Tensor


def memory_rows() -> Iterator[Row]:
    """Measure the bytes that compiled layers save under a memory budget, and compare
    their gradients.

    The ratio is the share of the bytes without a budget that are still saved.
    """
    if shutil.which("g++") is None and not torch.cuda.is_available():
        yield row(
            "memory_budget",
            None,
            None,
            "bytes",
            "compiling for a CPU needs a C++ compiler, and g++ is not installed",
        )
        return
    whole = compiled_step(Compute(compile="block"))
    for budget in BUDGETS:
        step = compiled_step(
            Compute(
                compile="block", activation_checkpointing="budget", memory_budget=budget
            )
        )
        difference = float(
            (step.gradients - whole.gradients).norm() / whole.gradients.norm()
        )
        yield row(
            f"memory_budget {budget:g}",
            step.saved_bytes,
            whole.saved_bytes,
            "bytes",
            f"loss differs by {float((step.loss - whole.loss).abs()):.1e}, gradients "
            f"by {difference:.1e}",
        )


def compiled_step(compute: Compute) -> Step:
    """Run one pass of a new model; the compiler's own budget is restored."""
    before = compiler.activation_memory_budget
    torch._dynamo.reset()
    model = drawn_decoder(shape_of(SMALL, SMALL_VOCAB, SMALL_LENGTH))
    try:
        configure(model, compute)
        ids = (
            torch.arange(SMALL_ROWS * SMALL_LENGTH).reshape(SMALL_ROWS, SMALL_LENGTH)
            % SMALL_VOCAB
        )
        with saved_tensors(model) as saved:
            loss = model(ids).square().mean()
        loss.backward()
    finally:
        compiler.activation_memory_budget = before
    gradients = torch.cat(
        [
            parameter.grad.flatten()
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
    )
    return Step(sum(saved.values()), loss.detach(), gradients)
