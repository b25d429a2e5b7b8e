"""A plan's figures against a real step of the same model on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.mixtures.training import Optimizer
from gristmill.train.models.multi_token import further_targets
from gristmill.train.models.shape import DECODED, ENCODED, Shape
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.optim.dtensor_sums import local
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.parallel.sharding import compute_dtype, sharded_model
from gristmill.train.parallel.world import single_process
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.planning.memory import (
    MASTER_BYTES,
    Form,
    Load,
    block_activation_bytes,
    optimizer_bytes,
    rank_memory,
)

MATMUL, GPU_MATMUL = 1024, 8192
"""Rows and columns of the plain matrix product; on a GPU so many that starting it does not count."""
WARMUPS = 2


@dataclass(frozen=True)
class Check:
    """One figure: what was foretold, and what was measured."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1


def check(shape: Shape, rows: int, length: int, optimizer: Optimizer, steps: int, utilisation: float) -> list[Check]:
    """Train a new model for some steps on random tokens in this process, and compare; on a GPU its peak memory too.

    Args:
        shape: the model.
        rows, length: of a batch.
        optimizer: the manifest's section.
        steps: how many are timed, after two that are not; the fastest counts.
        utilisation: what the prediction of the time takes for granted, of the rate of a plain matrix product.
    """
    with single_process() as world:
        dtype = compute_dtype("auto", world.device)
        model = sharded_model(shape, drawn(shape, 0), world, dtype)
        steppers = make_optimizers(model, optimizer)
        ids = torch.randint(0, shape.vocab_size, (rows, length), device=world.device)
        counted, kept = _count(model, ids)
        gradients = sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None)
        seconds = _fastest_step(model, steppers, optimizer.learning_rate, ids, steps)
        peak = peak_bytes(world.device)
        moments = sum(
            local(value).nbytes
            for stepper in steppers
            for state in stepper.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.numel() > 1
        )
        weights = sum(local(p).nbytes for p in model.parameters())
        rate = matmul_rate(world.device, dtype)
        tokens = rows * length
        flops = flops_per_token(shape, length)
        load = Load(rows, length, 1, dtype.itemsize, optimizer.kind)
        return [
            Check("arithmetic", flops.whole * tokens, counted, "flops"),
            Check("weights", MASTER_BYTES * shape.parameters, weights, "bytes"),
            Check("gradients", MASTER_BYTES * shape.parameters, gradients, "bytes"),
            Check("optimizer", optimizer_bytes(shape, optimizer.kind), moments, "bytes"),
            Check("activations", shape.layers * tokens * block_activation_bytes(shape, dtype.itemsize), kept, "bytes"),
            *([] if peak is None else [Check("peak memory", _allocated(shape, load), peak, "bytes")]),
            Check("step", flops.whole * tokens / (rate * utilisation), seconds, "seconds"),
        ]


def peak_bytes(device: torch.device) -> int | None:
    """The most that tensors on a GPU have taken at a time so far; None on a CPU, where nobody counts it."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _allocated(shape: Shape, load: Load) -> float:
    """What tensors are foretold to take at a time on one GPU: all but what lies outside of them and between them."""
    foretold = rank_memory(shape, Form(), load)
    return foretold.total - foretold.overhead


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    beside = {}
    targets, shape = next_tokens(ids), model.shape
    if shape.encoder_decoder:  # type: ignore[union-attr]
        targets = ids[:, : max(1, round(ids.shape[1] * DECODED))]
        ids, beside = ids[:, : max(1, round(ids.shape[1] * ENCODED))], {"decoder_ids": targets}
    weights = torch.full(targets.shape, 1.0 / targets.numel(), device=ids.device)
    wanted = [targets, *further_targets(targets, None, model.shape.multi_token)]  # type: ignore[union-attr, arg-type]
    head, *further = (partial(weighted_nll, targets=one, weights=weights) for one in wanted)
    found = model(ids, head, further=further) if further else [model(ids, head, **beside)]
    return torch.stack([one[0] for one in found]).sum()


def _count(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Operations of a forward and backward pass by torch's counter, and bytes that the layers keep for it."""
    from torch.utils.flop_counter import FlopCounterMode

    kept: dict[int, int] = {}
    inside = [0]

    def pack(tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if inside[0] and not isinstance(owner, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    handles = [hook for layer in model.model.layers for hook in _brackets(layer, inside)]  # type: ignore[union-attr]
    counter = FlopCounterMode(display=False, custom_mapping=uncounted())
    with counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = _forward(model, ids)
        for hook in handles:
            hook.remove()
        loss.backward()
    return float(counter.get_total_flops()), float(sum(kept.values()))


def _brackets(layer: Any, inside: list[int]) -> list[Any]:
    """Hooks that say when a layer computes."""

    def enter(*_: Any) -> None:
        inside[0] += 1

    def leave(*_: Any) -> None:
        inside[0] -= 1

    return [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]


def uncounted() -> dict[Any, Any]:
    """Formulas for operations that torch's counter passes over: attention on CPUs, and sums of products in place."""

    def attention(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        # Products of queries and keys, and of their weights and values, for each head of the queries, of which several
        # may share the keys: the formula of torch 2.11 takes no such shapes.
        batch, heads, length, width = query
        return 2 * int(batch * heads * length * key[2]) * int(width + value[3])

    def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        # Gradients of queries, keys, values and of the weights: twice the forward pass. What a kernel computes
        # again (torch counts that for CUDA) is not arithmetic of the model.
        return 2 * attention(query, key, value)

    def addmm(into: Any, left: Any, right: Any, *rest: Any, **named: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    ops = torch.ops.aten
    return {
        ops._scaled_dot_product_flash_attention_for_cpu: attention,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        ops.addmm_: addmm,
    }


def _fastest_step(
    model: nn.Module, steppers: list[torch.optim.Optimizer], rate: float, ids: Tensor, steps: int
) -> float:
    best, never = float("inf"), torch.tensor(False, device=ids.device)
    for number in range(WARMUPS + steps):
        started = time.perf_counter()
        _forward(model, ids).backward()
        update(steppers, rate, never)
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        if number >= WARMUPS:
            best = min(best, time.perf_counter() - started)
    return best


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a plain matrix product, the best of some."""
    size = GPU_MATMUL if device.type == "cuda" else MATMUL
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
