"""The processes of a training: joining them, and what they tell each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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


def max_over_ranks(value: float, world: World) -> float:
    """The largest of all ranks' values. Travels over the CPU: a GPU's queue is not waited for."""
    if world.size == 1:
        return value
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box.item())


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """The sum of a tensor over all ranks, in place where there are several."""
    if world.size > 1:
        dist.all_reduce(values)
    return values
