"""Processes, devices and sharding: one code path for one process and for many, on CPUs and on GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gristmill.train.shape import Shape
from gristmill.train.weights import TensorOf


@dataclass(frozen=True)
class World:
    """The processes of a training.

    Attributes:
        rank: this process, 0 to size - 1.
        size: number of processes.
        device: where this process computes.
        mesh: all processes in one dimension.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and reports."""
        return self.rank == 0


@contextmanager
def process_group() -> Iterator[World]:
    """Join the process group that torchrun's environment describes; leave it at the end.

    CPU tensors travel by gloo, GPU tensors by NCCL. The number of CPU threads per process is fixed, and algorithms
    are deterministic, so that the same world size gives the same bits.
    """
    on_gpu = torch.cuda.is_available()
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    make_deterministic(local_size)
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        yield World(rank, size, device, init_device_mesh(device.type, (size,)))
    finally:
        # After an error the other ranks may hang in a collective: leave at once, torchrun ends them.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def make_deterministic(processes: int) -> None:
    """Fix what lets the same computation differ between two runs: thread counts and algorithm choice.

    A process that is alone on its machine keeps PyTorch's own number of threads (all cores, or OMP_NUM_THREADS);
    several share the cores evenly, since torchrun would leave them one thread each.
    """
    if processes > 1:
        torch.set_num_threads(max(1, available_cores() // processes))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Memory that is about to be overwritten need not be filled with NaN first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compute_dtype(precision: Literal["auto", "fp32", "bf16"], device: torch.device) -> torch.dtype:
    """The dtype of matrix products: bf16 on a GPU and fp32 on a CPU, unless the manifest says otherwise."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision == "bf16" else torch.float32


def sharded_model(shape: Shape, tensor_of: TensorOf, world: World, dtype: torch.dtype) -> nn.Module:
    """A model whose parameters are spread over all processes, at world size 1 too (torchtitan #3148).

    Master weights and the reduction of gradients are float32, compute is `dtype`. Every process gets its values from
    `tensor_of`, tensor by tensor, so no process ever holds more than one whole tensor beside its share.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import distribute_tensor

    from gristmill.train.model import Llama

    # Masks and loss weights that pass through `forward` must keep their dtype.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    with torch.device("meta"):
        model = Llama(shape)
    for layer in model.model.layers:
        fully_shard(layer, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    model.to_empty(device=world.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = tensor_of(name, parameter.shape).to(world.device)
            parameter.copy_(distribute_tensor(whole, world.mesh, parameter.placements, src_data_rank=None))  # type: ignore[attr-defined]
    assert_sharded(model)
    assert_compute_dtype(model, dtype)
    return model


def assert_sharded(model: nn.Module) -> None:
    """Refuse to go on with parameters that are not shares of float32 master weights.

    Raises:
        RuntimeError: a parameter is no float32 DTensor: sharding was not applied, or was undone by a forward pass
            outside `evaluating`.
    """
    from torch.distributed.tensor import DTensor

    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.dtype != torch.float32:
            raise RuntimeError(f"{name} is {type(parameter).__name__} of {parameter.dtype}, not a float32 DTensor: "
                               "sharding was not applied to it, or a forward pass without `evaluating` undid it")


def assert_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """On the first forward pass, refuse to go on if layers do not multiply in `dtype`.

    Raises:
        RuntimeError: (in that pass) the precision policy was not applied.
    """
    probe = next(module for module in model.modules() if isinstance(module, nn.Linear))

    def check(module: nn.Linear, arguments: tuple[Tensor, ...]) -> None:
        found = {module.weight.dtype, arguments[0].dtype}
        handle.remove()
        if found != {dtype}:
            raise RuntimeError(f"layers compute in {found}, not in {dtype}: the precision policy was not applied")

    handle = probe.register_forward_pre_hook(check)  # type: ignore[arg-type]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Forward passes without gradients, after which the model is sharded again.

    FSDP shards the root's parameters again in the backward pass. Where there is none they would stay whole, in the
    compute dtype, and an optimizer or an export would take them for the master weights.
    """
    from torch.distributed.fsdp import FSDPModule

    with torch.no_grad():
        yield
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All master weights, gathered on every process, float32 on the CPU."""
    assert_sharded(model)
    return {name: parameter.full_tensor().detach().cpu()  # type: ignore[attr-defined]
            for name, parameter in model.named_parameters()}


def agree(value: Any, world: World) -> Any:
    """The first rank's value, on every rank. Travels over the CPU: a GPU's queue is not waited for."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def any_rank(flag: bool, world: World) -> bool:
    """Whether the flag is set on any rank. Travels over the CPU: a GPU's queue is not waited for."""
    if world.size == 1:
        return flag
    box = torch.tensor([int(flag)])
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return bool(box.item())


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """The sum of a tensor over all ranks, in place where there are several."""
    if world.size > 1:
        dist.all_reduce(values)
    return values
