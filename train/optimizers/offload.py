"""Moments in host memory, loaded to the device parameter by parameter for the update.

The update is computed on the device, so it is bit-equal to one without offloading, and
a bad step is skipped without a host synchronisation. Each moment crosses the bus twice
per step; the device holds the moments of one parameter at a time. (torchao's
CPUOffloadOptimizer computes on the host, needs the weights there, and cannot be skipped
by a flag on the device; FSDP2's CPUOffloadPolicy also moves weights and gradients.) On
a CPU nothing is gained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from gristmill.train.optimizers.dtensor_sums import local

STEP = "step"
"""AdamW's step count, a scalar that stays on the device."""


def host_zeros_like(parameter: Tensor) -> Tensor:
    """Zeros in the shape of a parameter's local shard in host memory, pinned if there
    is a GPU.
    """
    shard = local(parameter)
    zeros = torch.zeros(
        shard.shape,
        dtype=shard.dtype,
        device="cpu",
        pin_memory=torch.cuda.is_available(),
    )
    return _sharded_like(parameter, zeros)


def is_offloaded(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer's moments are in host memory."""
    return getattr(optimizer, "moments_on_host", False)


def load_each(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield each parameter while it is the optimizer's only one and its moments are on
    the device.
    """
    groups = optimizer.param_groups
    for group in groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            host_moments = {
                name: value for name, value in state.items() if name != STEP
            }
            for name, value in host_moments.items():
                shard = local(value).to(parameter.device, non_blocking=True, copy=True)
                state[name] = _sharded_like(value, shard)
            optimizer.param_groups = [{**group, "params": [parameter]}]
            yield parameter
            optimizer.param_groups = groups
            for name, value in host_moments.items():
                local(value).copy_(local(state[name]), non_blocking=True)
            state.update(host_moments)


def wait_for_moments(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Wait for the copies of the last update's moments to host memory."""
    if torch.cuda.is_available() and any(map(is_offloaded, optimizers)):
        torch.cuda.current_stream().synchronize()


def _sharded_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """DTensor of a local shard with the placements of another tensor.

    DTensor.from_local would move the shard to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return shard
    return DTensor(shard, tensor._spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
