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
    return _redistributed(
        torch.stack([local(tensor).to(dtype) for tensor in tensors]),
        tensors,
        to_shares=True,
    )


def give_back(share: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """This process's shards of k matrices sharded like `tensors`, in their dtype, from
    the whole matrices of each process's share; a collective.
    """
    shards = _redistributed(share, tensors, to_shares=False)
    return shards.to(tensors[0].dtype).unbind()


def _redistributed(part: Tensor, tensors: Sequence[Tensor], to_shares: bool) -> Tensor:
    """Turn this process's shards of a stack of tensors into whole ones, or back."""
    from torch.distributed.tensor import DTensor, Shard

    first = tensors[0]
    if not isinstance(first, DTensor):
        return part
    stacked: Any = first.unsqueeze(0)
    layouts = (stacked.placements, [Shard(0)] * first.device_mesh.ndim)
    source, target = layouts if to_shares else layouts[::-1]
    shape = torch.Size((len(tensors), *first.shape))
    whole = DTensor.from_local(
        part,
        first.device_mesh,
        source,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return local(whole.redistribute(placements=target))
