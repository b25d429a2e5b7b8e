"""`gristmill bench train`: what compiled layers keep under a memory budget, and that they learn the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch._functorch.config as compiler
from torch import Tensor

from gristmill.mixtures.engine import Compute
from gristmill.mixtures.model import Model
from gristmill.train.models.llama import Llama, configure
from gristmill.train.models.shape import shape_of
from gristmill.train.models.weights import drawn

VOCAB, LENGTH, ROWS = 128, 64, 4
SECTION = Model(layers=1, width=64, heads=4)
BUDGETS = (0.5, 0.0)
Row = dict[str, Any]


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


def rows() -> Iterator[Row]:
    """Measure; `ratio` is the share of the bytes that a budget leaves, of those that it is a share of."""
    if shutil.which("g++") is None and not torch.cuda.is_available():
        yield {"name": "memory_budget", "ours": None, "peer": None, "unit": "bytes", "ratio": None,
               "note": "compiling for a CPU needs a C++ compiler, and g++ is not installed"}
        return
    whole = step(Compute(compile="block"))
    for budget in BUDGETS:
        found = step(Compute(compile="block", activation_checkpointing="budget", memory_budget=budget))
        furthest = float((found.gradients - whole.gradients).norm() / whole.gradients.norm())
        yield {"name": f"memory_budget {budget:g}", "ours": found.kept, "peer": whole.kept, "unit": "bytes",
               "ratio": found.kept / whole.kept,
               "note": f"loss differs by {float((found.loss - whole.loss).abs()):.1e}, gradients by {furthest:.1e}"}


def step(compute: Compute) -> Step:
    """One pass of a new model; the compiler's own budget is put back."""
    before = compiler.activation_memory_budget
    torch._dynamo.reset()
    shape, kept = shape_of(SECTION, VOCAB, LENGTH), {}
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
        ids = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % VOCAB
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(ids).square().mean()
        loss.backward()
    finally:
        compiler.activation_memory_budget = before
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return Step(sum(kept.values()), loss.detach(), gradients)
