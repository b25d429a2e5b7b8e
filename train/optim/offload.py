"""Moments in host memory: each parameter's come to the device for its update, and go back.

The update itself is computed on the device as ever, so that its bits are those of moments that stay there, and so that
a bad step is held back without asking the host. What crosses the bus is each moment, once in and once out per step;
what it takes on the device is the moments of the largest parameter. (Torchao's CPUOffloadOptimizer computes on the
host, which needs the weights there too, and cannot be held back by a flag on the device; FSDP2's CPUOffloadPolicy
moves weights and gradients along.) On a CPU nothing is gained, but the same copies are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from gristmill.train.optim.sharded import local

STEP = "step"
"""AdamW's count of steps, a scalar, which stays on the device."""


def host_zeros_like(parameter: Tensor) -> Tensor:
    """Zeros of this process's share of a parameter in host memory, page-locked where there is a GPU."""
    share = local(parameter)
    zeros = torch.zeros(share.shape, dtype=share.dtype, device="cpu", pin_memory=torch.cuda.is_available())
    return _shared_as(parameter, zeros)


def keep_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Say that an optimizer's moments were made by `host_zeros_like`."""
    optimizer.moments_on_host = True  # type: ignore[attr-defined]


def is_on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's moments lie in host memory."""
    return getattr(optimizer, "moments_on_host", False)


def one_by_one(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Each parameter, while it is the only one that the optimizer has, and its moments lie on the device."""
    groups = optimizer.param_groups
    for group in groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            kept = {name: value for name, value in state.items() if name != STEP}
            state.update(
                {
                    name: _shared_as(value, local(value).to(parameter.device, non_blocking=True, copy=True))
                    for name, value in kept.items()
                }
            )
            optimizer.param_groups = [{**group, "params": [parameter]}]
            yield parameter
            optimizer.param_groups = groups
            for name, value in kept.items():
                local(value).copy_(local(state[name]), non_blocking=True)
            state.update(kept)


def wait_until_back(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Wait until the moments that the last update sent back to the host have come there, before they are read."""
    if torch.cuda.is_available() and any(map(is_on_host, optimizers)):
        torch.cuda.current_stream().synchronize()


def _shared_as(tensor: Tensor, share: Tensor) -> Tensor:
    """A tensor that is split among the processes as another one is, of this process's share of it.

    DTensor.from_local would move the share to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return share
    return DTensor(share, tensor._spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
