"""The processes of a training: joining them, and what they tell each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gristmill.mixtures.engine import Parallel
from gristmill.mixtures.own_code import OwnCodeError
from gristmill.train.parallel.hosts import TIMEOUT
from gristmill.train.parallel.row_split import RowSplit

Found = TypeVar("Found")

STORE_FILE = "GRISTMILL_STORE_FILE"
"""The variable that names the file by which the ranks of one machine find each other (see torchrun.py)."""
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
"""Of the mesh: neighbours along the last one exchange most, and are neighbours on the machine."""


class DeviceError(RuntimeError):
    """There are fewer GPUs than processes."""


@dataclass(frozen=True)
class World:
    """The processes of a training.

    Attributes:
        rank: this process, 0 to size - 1.
        size: number of processes.
        device: where this process computes.
        mesh: all processes, in the dimensions pipeline, replicate, shard, context and tensor.
        weights: the same, with those along context counted to shard; they split weights alike.
        deals_experts: whether those along shard have experts of their own each, where a model has any.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    weights: DeviceMesh
    deals_experts: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and reports."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Into how many shares a batch is cut: processes along tensor, context and pipeline compute the same rows."""
        return self._along("replicate") * self._along("shard")

    @property
    def averaged_over(self) -> int:
        """Over how many processes FSDP takes the mean of gradients, each of which has those of other tokens."""
        return self.data_size * self._along("context")

    @property
    def data_rank(self) -> int:
        """Which share this process computes."""
        return self._place("replicate") * self._along("shard") + self._place("shard")

    @property
    def data_mesh(self) -> DeviceMesh:
        """Where FSDP splits weights (its last dimension) and replicates them (its first of two)."""
        return self.weights["replicate", "shard"] if self._along("replicate") > 1 else self.weights["shard"]

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The processes that split each matrix, if there are several."""
        return self.weights["tensor"] if self._along("tensor") > 1 else None

    @property
    def shards_weights(self) -> bool:
        """Whether several processes share the weights of a replica."""
        return self.data_mesh.size(self.data_mesh.ndim - 1) > 1

    @property
    def sharing_group(self) -> dist.ProcessGroup | None:
        """The processes that share the weights of a replica, if there are several."""
        return self.weights.get_group("shard") if self.shards_weights else None

    @property
    def row_split(self) -> RowSplit | None:
        """The processes that compute the same rows, each a share of their tokens, if there are several."""
        size = self._along("context")
        return RowSplit(self.mesh.get_group("context"), self._place("context"), size) if size > 1 else None

    @property
    def stage(self) -> int:
        """The place of this process in its pipeline."""
        return self._place("pipeline")

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The processes of this one's pipeline, if there are several."""
        return self.mesh.get_group("pipeline") if self._along("pipeline") > 1 else None

    @property
    def counts(self) -> bool:
        """Whether what this process measures is counted: a pipeline's last stage, and one of those that compute the
        same rows, does."""
        return self._place("tensor") == self._place("context") == 0 and self.stage == self._along("pipeline") - 1

    def _along(self, dimension: str) -> int:
        return self.mesh.size(DIMENSIONS.index(dimension))

    def _place(self, dimension: str) -> int:
        return self.mesh.get_local_rank(dimension)


@contextmanager
def process_group(
    parallel: Parallel | None = None, pipelined: bool = True, split: bool = True, store: Any = None
) -> Iterator[World]:
    """Join the process group that torchrun's environment describes; leave it at the end.

    Args:
        parallel: how the training is spread; all processes shard if absent.
        pipelined: whether this training may be pipelined, and its rows split; otherwise those processes shard.
        split: whether its matrices may be split; otherwise those processes shard.
        store: by which the processes find each other; if absent the file that STORE_FILE names, or torchrun's.

    CPU tensors travel by gloo, GPU tensors by NCCL. The number of CPU threads per process is fixed, and algorithms
    are deterministic, so that the same world size gives the same bits.

    Raises:
        DeviceError: this machine has GPUs, but not one for each of its processes.
    """
    on_gpu = torch.cuda.is_available()
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu and local_size > (gpus := torch.cuda.device_count()):
        raise DeviceError(
            f"engine.ranks is {local_size}, a process for each GPU, but this machine has {gpus}: set "
            f"engine.ranks to {gpus}, or CUDA_VISIBLE_DEVICES to nothing for a training on CPUs"
        )
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    make_deterministic(local_size)
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None and STORE_FILE in os.environ:
        store = dist.FileStore(os.environ[STORE_FILE], size)  # type: ignore[attr-defined]
    found = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=exchange_timeout(), **found)
    try:
        yield make_world(parallel or Parallel(), device, pipelined, split)
    finally:
        # After an error the other ranks may hang in a collective: leave at once, torchrun ends them.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def make_world(parallel: Parallel, device: torch.device, pipelined: bool = True, split: bool = True) -> World:
    """The processes of the group that was joined, in one form."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = dict(zip(DIMENSIONS, parallel.sizes(size, pipelined, split), strict=True))
    mesh = weights = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=DIMENSIONS)
    if (context := sizes.pop("context")) > 1:
        sizes["shard"] *= context
        weights = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if (timeout := exchange_timeout()) is not None:
        for one in (mesh, weights):  # a mesh makes its groups with torch's own timeouts (docs/patched.md)
            for group in one.get_all_groups():
                dist.distributed_c10d._set_pg_timeout(timeout, group)
    return World(rank, size, device, mesh, weights, parallel.deal_experts and sizes["shard"] > 1)


def exchange_timeout() -> timedelta | None:
    """How long an exchange between processes of several hosts may take; torch's own bounds hold on one machine."""
    seconds = os.environ.get(TIMEOUT)
    return timedelta(seconds=float(seconds)) if seconds else None


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


def on_first(act: Callable[[], Found], world: World) -> Found:
    """What code of the user's does on the first rank, told to every rank.

    Raises:
        OwnCodeError: on every rank, where the first one has raised it.
    """
    found: Found | None = None
    error: OwnCodeError | None = None
    if world.is_first:
        try:
            found = act()
        except OwnCodeError as raised:
            error = raised
    told, message = agree((found, None if error is None else str(error)), world)
    if message is not None:
        raise OwnCodeError(message) from error
    result: Found = told
    return result


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
    """The sum of a tensor over all shares of a batch, in place where there are several processes."""
    if world.size > 1:
        if not world.counts:
            values.zero_()
        dist.all_reduce(values)
    return values


@contextmanager
def single_process() -> Iterator[World]:
    """Join a group of one, as torchrun would start it, but for a store that nobody else can reach."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with process_group(store=dist.HashStore()) as world:  # type: ignore[attr-defined]
        yield world
