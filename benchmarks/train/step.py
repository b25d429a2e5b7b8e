"""`gristmill bench train`: a whole training step and generation, against transformers' Llama and plain matmul."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._functorch.config as compiler
from torch import Tensor

from benchmarks.measuring import Row, row
from gristmill.mixtures.engine import Compute
from gristmill.mixtures.model import Model
from gristmill.mixtures.training import Optimizer
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_writing import write_packed_set
from gristmill.train.generation.scheduler import generate
from gristmill.train.loop.step import accumulate_gradients
from gristmill.train.models.decoder import Llama, configure
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.parallel.process_groups import World, single_process
from gristmill.train.parallel.sharding import compute_dtype, sharded_model

VOCAB, LENGTH, ROWS = 4096, 256, 16
SECTION = Model(layers=4, width=128, heads=4)
MATMUL = 2048
NEW_TOKENS = 64
WARMUPS, REPEATS = 2, 8
SMALL_VOCAB, SMALL_LENGTH, SMALL_ROWS = 128, 64, 4
SMALL = Model(layers=1, width=64, heads=4)
BUDGETS = (0.5, 0.0)
Action = Callable[[], Any]


def rows() -> Iterator[Row]:
    """Measure, all sides by turns here and now."""
    yield from speed_rows()
    yield from memory_rows()


def speed_rows() -> Iterator[Row]:
    """Tokens and arithmetic per second."""
    shape = shape_of(SECTION, VOCAB, LENGTH)
    with single_process() as world, tempfile.TemporaryDirectory() as folder:
        step = our_training_step(shape, world, Path(folder))
        ours, peer = per_second(ROWS * LENGTH, world, step, peer_training_step(shape, world))
        yield row(
            "training step, vs transformers Llama", ours, peer, "tokens/s", floor=1.0
        )  # 1.19, 2026-11-22, 2 cores
        a = torch.randn(MATMUL, MATMUL, device=world.device, dtype=compute_dtype("auto", world.device))
        steps, products = per_second(1, world, step, lambda: a @ a)
        arithmetic = steps * ROWS * LENGTH * shape.flops_per_token(LENGTH)
        yield row("model arithmetic, vs plain matmul", arithmetic / 1e9, products * 2 * MATMUL**3 / 1e9, "GFLOP/s")
        ours, peer = per_second(ROWS * NEW_TOKENS, world, *generations(shape, world))
        yield row("generation, vs transformers Llama", ours, peer, "tokens/s", floor=0.9)  # 1.05, 2026-11-22, 2 cores


def our_training_step(shape: Shape, world: World, folder: Path) -> Action:
    """Our step: read rows, forward, backward, clip, fused AdamW, losses by source; sharded as always."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS * 4, LENGTH))
    write_packed_set(folder, ids, {"all": len(ids)}, {"vocab_size": VOCAB, "eos": 0, "pad": 1, "sha256": ""})
    model = sharded_model(shape, drawn(shape, 0), world, compute_dtype("auto", world.device))
    token_bytes = torch.full((VOCAB,), 4.0, device=world.device)
    objective = NextToken(PackedSet(folder), 0, token_bytes, shape)
    section = Optimizer()
    optimizers = make_optimizers(model, section)
    never = torch.tensor(False, device=world.device)
    batch = np.arange(ROWS)

    def step() -> None:
        accumulate_gradients(model, objective, [objective.prepare(batch)], objective.weight(batch), world)
        clip_gradients(model, section)
        update(optimizers, 1e-3, never)

    return step


def peer_training_step(shape: Shape, world: World) -> Action:
    """The same with LlamaForCausalLM and its own loss, in the same precision."""
    model = peer_model(shape, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), device=world.device)
    dtype = compute_dtype("auto", world.device)

    def step() -> None:
        with torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def generations(shape: Shape, world: World) -> tuple[Action, Action]:
    """Greedy generation for a batch of prompts: ours, and transformers' `generate`."""
    ours = Llama(shape).to(world.device)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(drawn(shape, 0)(name, parameter.shape))
    peer = peer_model(shape, world).eval()
    prompts = torch.randint(6, VOCAB, (ROWS, 32), device=world.device)
    mask = torch.ones_like(prompts)
    return (
        lambda: generate(ours, prompts.tolist(), NEW_TOKENS, ()),
        lambda: peer.generate(
            prompts, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=1
        ),
    )


def peer_model(shape: Shape, world: World) -> Any:
    """transformers' Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.padded_vocab_size,
            hidden_size=shape.width,
            intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=shape.tied_embeddings,
        )
    ).to(world.device)


def per_second(amount: float, world: World, ours: Action, peer: Action) -> tuple[float, float]:
    """How much each side does per second in its best run; by turns, so that both meet the same other load."""
    times: dict[Action, list[float]] = {ours: [], peer: []}
    for _ in range(WARMUPS + REPEATS):
        for action, measured in times.items():
            started = time.perf_counter()
            action()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            measured.append(time.perf_counter() - started)
    return amount / min(times[ours][WARMUPS:]), amount / min(times[peer][WARMUPS:])


class Step(NamedTuple):
    """One forward and backward pass.

    Attributes:
        kept: bytes saved for the backward pass, weights left out.
        loss: a scalar.
        gradients: of all weights, one after the other.
    """

    kept: int
    loss: Tensor
    gradients: Tensor


def memory_rows() -> Iterator[Row]:
    """What compiled layers keep under a memory budget, and that they learn the same.

    `ratio` is the share of the bytes that a budget leaves, of those that it is a share of.
    """
    if shutil.which("g++") is None and not torch.cuda.is_available():
        yield row(
            "memory_budget", None, None, "bytes", "compiling for a CPU needs a C++ compiler, and g++ is not installed"
        )
        return
    whole = one_step(Compute(compile="block"))
    for budget in BUDGETS:
        found = one_step(Compute(compile="block", activation_checkpointing="budget", memory_budget=budget))
        furthest = float((found.gradients - whole.gradients).norm() / whole.gradients.norm())
        yield row(
            f"memory_budget {budget:g}",
            found.kept,
            whole.kept,
            "bytes",
            f"loss differs by {float((found.loss - whole.loss).abs()):.1e}, gradients by {furthest:.1e}",
        )


def one_step(compute: Compute) -> Step:
    """One pass of a new model; the compiler's own budget is put back."""
    before = compiler.activation_memory_budget
    torch._dynamo.reset()
    shape, kept = shape_of(SMALL, SMALL_VOCAB, SMALL_LENGTH), {}
    model, tensor_of = Llama(shape), drawn(shape, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensor_of(name, parameter.shape))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        configure(model, compute)
        ids = torch.arange(SMALL_ROWS * SMALL_LENGTH).reshape(SMALL_ROWS, SMALL_LENGTH) % SMALL_VOCAB
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(ids).square().mean()
        loss.backward()
    finally:
        compiler.activation_memory_budget = before
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return Step(sum(kept.values()), loss.detach(), gradients)
