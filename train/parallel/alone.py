"""What sharding costs a process that is alone: copies of gradients, which nothing is reduced with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class NothingToReduce:
    """In place of FSDP's reduction of gradients in one process: what goes in is what comes out.

    FSDP asks for memory twice, for what is reduced and for the result, and copies the one to the other. Here both are
    the same memory, so that the copy does nothing (torch 2.13, `foreach_reduce`).
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory, and the next time the same once more."""
        given, self._input = self._input, None
        if given is not None and (given.shape, given.dtype, given.device) == (torch.Size(size), dtype, device):
            return given
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """FSDP reduces nothing in one process.

        Raises:
            RuntimeError: it does.
        """
        raise RuntimeError("gradients of several processes are to be reduced as if there were one")


def reduce_nothing(model: nn.Module) -> None:
    """Let FSDP copy no gradients of a sharded model that one process trains."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(NothingToReduce())  # type: ignore[arg-type]
