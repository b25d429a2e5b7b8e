"""Comparison of a plan's predictions with a real step of the same model on this
machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.mixtures.sections.optimizers import Optimizer
from gristmill.train.distributed.fsdp import compute_dtype, sharded_model
from gristmill.train.distributed.process_groups import single_process
from gristmill.train.models.model_config import DECODED, ENCODED, Shape
from gristmill.train.models.multi_token import further_targets
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.optimizers.dtensor_sums import local
from gristmill.train.optimizers.optimizer import make_optimizers, update
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
"""Rows and columns of the plain matrix product; large enough on a GPU to hide launch
time.
"""
WARMUPS = 2


@dataclass(frozen=True)
class Check:
    """A predicted and a measured value."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement."""
        return self.predicted / self.measured - 1


def check(
    shape: Shape,
    rows: int,
    length: int,
    optimizer: Optimizer,
    steps: int,
    utilisation: float,
) -> list[Check]:
    """Train a new model for some steps on random tokens in this process, and compare;
    on a GPU also the peak memory.

    Args:
        shape: the model.
        rows, length: of a batch.
        optimizer: the manifest's section.
        steps: number of timed steps, after two untimed ones; the fastest counts.
        utilisation: share of the rate of a plain matrix product that the prediction
            assumes.
    """
    with single_process() as world:
        dtype = compute_dtype("auto", world.device)
        model = sharded_model(shape, drawn(shape, 0), world, dtype)
        steppers = make_optimizers(model, optimizer)
        ids = torch.randint(0, shape.vocab_size, (rows, length), device=world.device)
        counted, activation_bytes = _count(model, ids)
        gradients = sum(
            local(p.grad).nbytes for p in model.parameters() if p.grad is not None
        )
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
        # without framework and fragmentation
        memory = rank_memory(shape, Form(), load)
        return [
            Check("arithmetic", flops.whole * tokens, counted, "flops"),
            Check("weights", MASTER_BYTES * shape.parameters, weights, "bytes"),
            Check("gradients", MASTER_BYTES * shape.parameters, gradients, "bytes"),
            Check(
                "optimizer", optimizer_bytes(shape, optimizer.kind), moments, "bytes"
            ),
            Check(
                "activations",
                shape.layers * tokens * block_activation_bytes(shape, dtype.itemsize),
                activation_bytes,
                "bytes",
            ),
            *(
                []
                if peak is None
                else [
                    Check("peak memory", memory.total - memory.overhead, peak, "bytes")
                ]
            ),
            Check(
                "step", flops.whole * tokens / (rate * utilisation), seconds, "seconds"
            ),
        ]


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory of tensors on a GPU so far; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    beside = {}
    targets = next_tokens(ids)
    shape = model.shape
    if shape.encoder_decoder:  # type: ignore[union-attr]
        targets = ids[:, : max(1, round(ids.shape[1] * DECODED))]
        ids = ids[:, : max(1, round(ids.shape[1] * ENCODED))]
        beside = {"decoder_ids": targets}
    weights = torch.full(targets.shape, 1.0 / targets.numel(), device=ids.device)
    all_targets = [targets, *further_targets(targets, None, model.shape.multi_token)]  # type: ignore[union-attr, arg-type]
    head, *further = (
        partial(weighted_nll, targets=targets_at, weights=weights)
        for targets_at in all_targets
    )
    outputs = (
        model(ids, head, further=further) if further else [model(ids, head, **beside)]
    )
    return torch.stack([targets_at[0] for targets_at in outputs]).sum()


def _count(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Operations of a forward and backward pass by torch's counter, and bytes kept by
    the layers for it.
    """
    from torch.utils.flop_counter import FlopCounterMode

    bytes_by_storage: dict[int, int] = {}
    inside = [0]

    def pack(tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if inside[0] and not isinstance(owner, nn.Parameter):
            storage = tensor.untyped_storage()
            bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    def enter(*_: Any) -> None:
        inside[0] += 1

    def leave(*_: Any) -> None:
        inside[0] -= 1

    handles = []
    for layer in model.get_submodule("model.layers").children():
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave))
    counter = FlopCounterMode(display=False, custom_mapping=uncounted())
    with counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = _forward(model, ids)
        for hook in handles:
            hook.remove()
        loss.backward()
    return float(counter.get_total_flops()), float(sum(bytes_by_storage.values()))


def uncounted() -> dict[Any, Any]:
    """Formulas for operations missing in torch's counter: attention on CPUs, and
    in-place sums of products.
    """

    def attention(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
        # Products of queries and keys, and of their weights and values, for each head
        # of the queries, of which several may share the keys: the formula of torch 2.11
        # takes no such shapes.
        batch, heads, length, width = query
        return 2 * int(batch * heads * length * key[2]) * int(width + value[3])

    def attention_backward(
        gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any
    ) -> int:
        # Gradients of queries, keys, values and of the weights: twice the forward pass.
        # What a kernel computes again (torch counts that for CUDA) is not arithmetic of
        # the model.
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
    model: nn.Module,
    steppers: list[torch.optim.Optimizer],
    rate: float,
    ids: Tensor,
    steps: int,
) -> float:
    best = float("inf")
    never = torch.tensor(False, device=ids.device)
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
