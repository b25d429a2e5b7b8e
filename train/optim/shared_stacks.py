"""Stacks of matrices of one shape, shared out among the processes that shard them: each
process computes whole matrices, as in nanochat's `MuonAdamW`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.train.optim.dtensor_sums import local


def stacks_of(matrices: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group matrices of equal shape and sharding."""

    def layout(matrix: nn.Parameter) -> str:
        return f"{tuple(matrix.shape)} {getattr(matrix, 'placements', None)}"

    return [list(stack) for _, stack in groupby(sorted(matrices, key=layout), layout)]


def share_out(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole matrices of this process's share, (k / processes, m, n), from k sharded
    ones of equal shape (m, n) and sharding; a collective.
    """
    from torch.distributed.tensor import DTensor

    stack = torch.stack([local(tensor).to(dtype) for tensor in tensors])
    if not isinstance(tensors[0], DTensor):
        return stack
    by_shards, by_matrices = _layouts(tensors[0])
    return _redistributed(stack, tensors, by_shards, by_matrices)


def give_back(share: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """This process's shards of k matrices sharded like `tensors`, in their dtype, from
    the whole matrices of each process's share; a collective.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensors[0], DTensor):
        by_shards, by_matrices = _layouts(tensors[0])
        share = _redistributed(share, tensors, by_matrices, by_shards)
    return share.to(tensors[0].dtype).unbind()


def _layouts(matrix: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Placements of a stack of matrices: sharded like one of them, and shared out."""
    from torch.distributed.tensor import Shard

    return matrix.unsqueeze(0).placements, [Shard(0)] * matrix.device_mesh.ndim


def _redistributed(
    part: Tensor, tensors: Sequence[Any], source: Sequence[Any], target: Sequence[Any]
) -> Tensor:
    """Redistribute a stack of tensors, from the local part in one layout to that in
    another.
    """
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(tensors), *tensors[0].shape))
    whole = DTensor.from_local(
        part,
        tensors[0].device_mesh,
        source,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return local(whole.redistribute(placements=target))
