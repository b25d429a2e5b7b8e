"""What sharding would cost a process that is alone: copies of weights and of gradients that nobody else has parts of.

FSDP stays what it is around them (its insides are those of torch 2.13, which pyproject.toml pins).
"""

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


def spare_copies(model: nn.Module) -> None:
    """Let FSDP copy neither gradients nor, where layers compute in the dtype of the weights, weights.

    To be called when the sharded parameters have their values, by a process whose parameters nobody else has shards of.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(NothingToReduce())  # type: ignore[arg-type]
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    _lend(parameter)


def _lend(parameter: Any) -> None:
    """Make what FSDP gathers a parameter's whole values into the memory where they are.

    A step of the optimizer is then seen there at once; FSDP copies the values onto themselves, which does nothing, and
    is kept from giving the memory up.

    Args:
        parameter: an FSDPParam.
    """
    # FSDP takes note of new values before the first forward pass only, which is later than this.
    parameter.reset_sharded_param()
    values: Tensor = parameter._sharded_param_data
    whole = values.untyped_storage().nbytes() == values.nbytes == parameter._orig_size.numel() * values.itemsize
    if whole and parameter.mp_policy.param_dtype in (None, values.dtype) and type(values) is Tensor:
        parameter.all_gather_outputs = [values]
        parameter.free_unsharded_param = _keep


def _keep() -> None:
    """In place of FSDP's giving up of whole values, which are the weights themselves."""
