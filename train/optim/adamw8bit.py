"""AdamW with 8-bit moments in blocks of 256 (Dettmers et al. 2022), by torchao."""

from __future__ import annotations

import torch

from gristmill.mixtures.schema.optimizer import Optimizer
from gristmill.train.optim.builder import Parameters, decay_groups
from gristmill.train.optim.optimizer import eager_on_cpu, parameters_of, set_rate


@torch.no_grad()
def build(parameters: Parameters, section: Optimizer) -> torch.optim.Optimizer:
    """Create torchao's AdamW.

    A shard that is small or does not divide into blocks keeps float32 moments, so
    results depend slightly on the number of processes.
    """
    try:
        from torchao.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "optimizer.kind is adamw8bit, but torchao is not installed; install it "
            "with: pip install 'gristmill[quant]', or choose another optimizer.kind"
        ) from error
    optimizer = AdamW8bit(
        decay_groups(parameters, section),
        lr=section.learning_rate,
        betas=section.decays,
        eps=section.eps,
    )
    # A step with zero gradients and learning rate creates the moments at zero. Step
    # counts are reset and moved to the device, where an update can be skipped.
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    set_rate(optimizer, 0.0)
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    with eager_on_cpu(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter in parameters_of(optimizer):
        optimizer.state[parameter]["step"] = torch.zeros(
            (), dtype=torch.float32, device=parameter.device
        )
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"].fill_(rate)
    return optimizer  # type: ignore[no-any-return]
