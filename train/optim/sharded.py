"""Sums over sharded tensors, whatever the mesh: each process's share, and what all shares together give.

A parameter is a DTensor, split over one or several dimensions of the mesh. Elementwise arithmetic works on the local
share; only sums over a dimension that is split need the other processes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This process's share, with the same storage."""
    from torch.distributed.tensor import DTensor

    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-untyped-call]
    return found


def settled(tensor: Tensor) -> Tensor:
    """The same with no sum pending: what was reduced over a split dimension is the same on all its processes."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Replicate() if place.is_partial() else place for place in tensor.placements]
    return tensor.redistribute(placements=placements)


def sum_along(tensor: Tensor, dim: int) -> Tensor:
    """Sum over one dimension, which is kept with size 1."""
    return settled(tensor.sum(dim=dim, keepdim=True))


def whole_sum(tensor: Tensor) -> Tensor:
    """The sum of all elements of all shares: a plain scalar, the same on every process."""
    return local(settled(tensor.sum()))


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of several tensors with all their shares, a plain float32 scalar."""
    norms = torch.nn.utils.get_total_norm(tensors, foreach=True)
    from torch.distributed.tensor import DTensor

    return (norms.full_tensor() if isinstance(norms, DTensor) else norms) ** 2
