"""Expert parallelism: the experts of each layer are distributed over processes, and
tokens are sent to them.

FSDP would shard the same weights by expert, but gather all experts of a layer for its
computation. Here each process keeps its experts as master weights, sharded like FSDP
shards them, so checkpoints, optimizers and exports do not differ.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gristmill.mixtures.sections.engine import Compute
from gristmill.train.distributed.process_groups import World
from gristmill.train.models.experts import Dealt, Experts


class ExpertsError(ValueError):
    """Experts cannot be distributed over this number of processes."""


def deal_experts(model: nn.Module, world: World, compute: Compute) -> set[nn.Parameter]:
    """Distribute a model's experts over the processes that share its weights, before it
    is sharded.

    Returns:
        their weights, which FSDP must ignore; an empty set for a model without experts.

    Raises:
        ExpertsError: the number of experts is not a multiple of the number of
            processes, or the model is compiled.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = world.data_mesh
    size, group = mesh.size(mesh.ndim - 1), mesh.get_group("shard")
    dealt = Dealt(
        group,
        size,
        world.averaged_over,
        mesh.get_group("replicate") if mesh.ndim > 1 else None,
    )
    expert_weights: set[nn.Parameter] = set()
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        if compute.compiles:
            raise ExpertsError(
                "engine.parallel.deal_experts: how many tokens a process gets is not "
                "known before, so such layers are not compiled; say "
                "engine.compute.compile: off, or remove it"
            )
        if len(module.gate_up_proj) % size:
            raise ExpertsError(
                f"engine.parallel.deal_experts: the model's {len(module.gate_up_proj)} "
                f"experts do not divide by the {size} processes of shard and context; "
                "use a divisor, or remove it"
            )
        module.dealt = dealt
        placements: Any = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        for name, weight in list(module.named_parameters(recurse=False)):
            split = nn.Parameter(
                distribute_tensor(
                    weight.detach(), mesh, placements, src_data_rank=None
                ),
                requires_grad=weight.requires_grad,
            )
            setattr(module, name, split)
            expert_weights.add(split)
    return expert_weights
