"""Adafactor: second moments of a matrix by its rows and columns (Shazeer & Stern 2018,
algorithms 4 and 5).

Variant, names and defaults are those of torch.optim.Adafactor, which the tests compare
with. PyTorch's takes no sharded matrices and synchronises with the device twice per
parameter and step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.train.optim.builder import Group, GuardedOptimizer, Moments, Parameters
from gristmill.train.optim.dtensor_sums import (
    gradient_of,
    local,
    reduce_partial,
    sum_along,
    total_sum,
)

BETA2_DECAY = -0.8
"""Section 7.2: the decay of the second moment is 1 - t^-0.8."""
LARGEST_UPDATE = 1.0
"""Section 6: d, the root mean square at which updates are clipped."""
SMALLEST_SCALE = 1e-3
"""Section 8: epsilon 2, the smallest root mean square of a parameter."""


class Adafactor(GuardedOptimizer):
    """Factored second moments, no first moment; works on DTensors, with no host
    synchronisation. The learning rate is relative to each parameter's root mean square
    and at most 1 / sqrt(step).
    """

    def moments(self, parameter: Tensor) -> Moments:
        """Step, and variances; of a matrix those of its rows and columns."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        zeros = torch.zeros_like(parameter)
        if parameter.ndim < 2:
            return {"step": step, "variance": zeros}
        return {
            "step": step,
            "row_var": sum_along(zeros, -1),
            "col_var": sum_along(zeros, -2),
        }

    def update(self, parameters: Parameters, group: Group, good: Tensor) -> None:
        """Scale each gradient by the factored root mean square."""
        for parameter in parameters:
            self._update(parameter, gradient_of(parameter), group, good)

    def _update(
        self, parameter: Tensor, gradient: Tensor, group: Group, good: Tensor
    ) -> None:
        from torch.distributed.tensor import DTensor

        state, lr = self.state[parameter], group["lr"]
        eps = torch.finfo(parameter.dtype).eps
        step_count = state["step"] + 1.0
        forgotten = step_count**BETA2_DECAY * good
        scale = (
            (total_sum(parameter * parameter) / parameter.numel())
            .sqrt()
            .clamp(min=SMALLEST_SCALE)
        )
        rate = scale * (step_count**-0.5).clamp(max=lr) * good
        squares = gradient * gradient
        if parameter.ndim < 2:
            local(state["variance"]).lerp_(local(squares), forgotten)
            estimate = local(state["variance"]).clone()
        else:
            local(state["row_var"]).lerp_(
                local(sum_along(squares, -1)) / parameter.size(-1), forgotten
            )
            local(state["col_var"]).lerp_(
                local(sum_along(squares, -2)) / parameter.size(-2), forgotten
            )
            # Algorithm 4, line 7: the outer product over the sum; means stand for sums on
            # both sides.
            mean = local(
                reduce_partial(state["row_var"].sum(dim=-2, keepdim=True))
            ) / parameter.size(-2)
            estimate = (
                local(state["row_var"]) @ local(state["col_var"]) / mean.clamp(min=eps)
            )
        step = estimate.clamp_(min=eps * eps).rsqrt_().mul_(local(gradient))
        step_squares = step * step
        if isinstance(parameter, DTensor):
            step_squares = DTensor.from_local(
                step_squares,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        rms = (total_sum(step_squares) / parameter.numel()).sqrt()
        local(parameter).mul_(1.0 - lr * group["weight_decay"] * good)
        local(parameter).sub_(step * (rate / (rms / LARGEST_UPDATE).clamp(min=1.0)))
        state["step"] += good


build = Adafactor
