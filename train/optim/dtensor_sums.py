"""Sums over DTensors on any mesh.

Elementwise arithmetic works on local shards; only sums over a sharded dimension
communicate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """Local shard of a tensor, with the same storage."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local()  # type: ignore[no-untyped-call, no-any-return]


def reduce_partial(tensor: Tensor) -> Tensor:
    """Reduce the pending sums of a DTensor, so that its processes hold equal values."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return tensor
    placements = [
        Replicate() if place.is_partial() else place for place in tensor.placements
    ]
    return tensor.redistribute(placements=placements)


def sum_along(tensor: Tensor, dim: int) -> Tensor:
    """Sum over one dimension, kept with size 1."""
    return reduce_partial(tensor.sum(dim=dim, keepdim=True))


def total_sum(tensor: Tensor) -> Tensor:
    """Sum of all elements of all shards: a plain scalar, equal on every process."""
    return local(reduce_partial(tensor.sum()))


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Norm of several tensors over all shards, a plain float32 scalar."""
    return local(reduce_partial(torch.nn.utils.get_total_norm(tensors, foreach=True)))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Gradients of the parameters that have one."""
    return [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that are trained, by name."""
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
