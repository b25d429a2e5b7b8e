"""Process group of a training, its device mesh, and collectives on plain values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gristmill.core.processes import in_environment
from gristmill.mixtures.schema.engine import Parallel
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.train.distributed.context_parallel import RowSplit
from gristmill.train.distributed.rendezvous import TIMEOUT
from gristmill.train.loop.batch_plan import micro_batches

Found = TypeVar("Found")

STORE_FILE = "GRISTMILL_STORE_FILE"
"""Environment variable with the path of the file store of the ranks of one machine (see
torchrun.py).
"""
CPU_INFO = Path("/proc/cpuinfo")
DIMENSIONS = ("replicate", "shard", "context", "tensor")
"""Dimensions of the mesh; processes along the last one communicate most and are
neighbours on a machine.
"""


class DeviceError(RuntimeError):
    """There are fewer GPUs than processes."""


@dataclass(frozen=True)
class World:
    """Processes of a training.

    Attributes:
        rank: this process, 0 to size - 1.
        size: number of processes.
        device: where this process computes.
        mesh: all processes, in the dimensions replicate, shard, context and tensor.
        weights: the same with context merged into shard; processes along both shard
            weights.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    weights: DeviceMesh

    @property
    def is_first(self) -> bool:
        """True if this process writes files and reports."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Number of shares of a batch: processes along tensor and context compute the
        same rows.
        """
        return self._along("replicate") * self._along("shard")

    @property
    def averaged_over(self) -> int:
        """Number of processes over which FSDP averages gradients, each with gradients
        of different tokens.
        """
        return self.data_size * self._along("context")

    @property
    def data_rank(self) -> int:
        """Share of a batch that this process computes."""
        return self._place("replicate") * self._along("shard") + self._place("shard")

    @property
    def data_mesh(self) -> DeviceMesh:
        """Mesh in which FSDP shards weights (last dimension) and replicates them (first
        of two dimensions).
        """
        return (
            self.weights["replicate", "shard"]
            if self._along("replicate") > 1
            else self.weights["shard"]
        )

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """Processes that split each matrix, if several."""
        return self.weights["tensor"] if self._along("tensor") > 1 else None

    @property
    def shards_weights(self) -> bool:
        """True if several processes share the weights of a replica."""
        return self.data_mesh.size(self.data_mesh.ndim - 1) > 1

    @property
    def row_split(self) -> RowSplit | None:
        """Processes that compute the same rows, each a share of their tokens, if
        several.
        """
        size = self._along("context")
        return (
            RowSplit(self.mesh.get_group("context"), self._place("context"), size)
            if size > 1
            else None
        )

    @property
    def counts(self) -> bool:
        """True if the measurements of this process count: one of the processes with the
        same rows.
        """
        return self._place("tensor") == self._place("context") == 0

    def micro_batches(self, rows: np.ndarray, size: int) -> list[np.ndarray]:
        """This process's share of rows (see batch_plan.micro_batches)."""
        return micro_batches(rows, self.data_rank, self.data_size, size)

    def _along(self, dimension: str) -> int:
        return self.mesh.size(DIMENSIONS.index(dimension))

    def _place(self, dimension: str) -> int:
        return self.mesh.get_local_rank(dimension)


@contextmanager
def process_group(
    parallel: Parallel | None = None,
    split_rows: bool = True,
    split: bool = True,
    store: Any = None,
) -> Iterator[World]:
    """Join the process group of torchrun's environment, and leave it at the end.

    Args:
        parallel: sizes of the mesh; by default all processes shard.
        split_rows: false if its rows cannot be split; those processes shard.
        split: false if its matrices cannot be split; those processes shard.
        store: rendezvous store; by default the file in STORE_FILE, or torchrun's store.

    CPU tensors use gloo, GPU tensors NCCL. The number of CPU threads per process is
    fixed and algorithms are deterministic, so that the same world size gives bit-equal
    results.

    Raises:
        DeviceError: this machine has GPUs, but fewer than processes.
    """
    on_gpu = torch.cuda.is_available()
    local_rank, local_size = (
        int(os.environ["LOCAL_RANK"]),
        int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    if on_gpu and local_size > (gpus := torch.cuda.device_count()):
        raise DeviceError(
            f"engine.ranks is {local_size}, a process for each GPU, but this machine "
            f"has {gpus}: set engine.ranks to {gpus}, or CUDA_VISIBLE_DEVICES to "
            "nothing for a training on CPUs"
        )
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    make_deterministic(local_size)
    precision = torch.get_float32_matmul_precision()
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    else:
        multiply_with_avx512()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None and STORE_FILE in os.environ:
        store = dist.FileStore(os.environ[STORE_FILE], size)  # type: ignore[attr-defined]
    rendezvous = (
        {} if store is None else {"store": store, "rank": rank, "world_size": size}
    )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=exchange_timeout(),
        **rendezvous,
    )
    try:
        yield make_world(parallel or Parallel(), device, split_rows, split)
    finally:
        torch.set_float32_matmul_precision(precision)
        # After an error other ranks may hang in a collective: exit at once, and
        # torchrun terminates them.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def make_world(
    parallel: Parallel,
    device: torch.device,
    split_rows: bool = True,
    split: bool = True,
) -> World:
    """Create the meshes of the current process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = dict(zip(DIMENSIONS, parallel.sizes(size, split_rows, split), strict=True))
    mesh = weights = init_device_mesh(
        device.type, tuple(sizes.values()), mesh_dim_names=DIMENSIONS
    )
    if (context := sizes.pop("context")) > 1:
        sizes["shard"] *= context
        weights = init_device_mesh(
            device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
    if (timeout := exchange_timeout()) is not None:
        # meshes create groups with torch's default timeouts (docs/patched.md)
        for device_mesh in (mesh, weights):
            for group in device_mesh.get_all_groups():
                dist.distributed_c10d._set_pg_timeout(timeout, group)
    return World(rank, size, device, mesh, weights)


def exchange_timeout() -> timedelta | None:
    """Timeout of collectives between hosts; None on one machine, for torch's
    defaults.
    """
    seconds = os.environ.get(TIMEOUT)
    return timedelta(seconds=float(seconds)) if seconds else None


def make_deterministic(processes: int) -> None:
    """Fix thread counts and algorithm choice, which could differ between two runs.

    A single process on a machine keeps PyTorch's number of threads (all cores, or
    OMP_NUM_THREADS); several share the cores evenly, as torchrun would give each one
    thread.
    """
    if processes > 1:
        cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):  # those of this process
            cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // processes))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Skip the NaN fill of uninitialised memory, which is overwritten anyway.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def multiply_with_avx512() -> None:
    """Have oneDNN multiply float32 matrices on AMD's processors with AVX-512, on which
    MKL runs its code for AVX2: a step of 1M parameters takes 0.7 of the time.

    PyTorch asks oneDNN where products may round to bfloat16. That needs Intel's AMX, so
    products on these processors stay float32.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if has_avx512 and CPU_INFO.exists() and "AuthenticAMD" in CPU_INFO.read_text():
        torch.set_float32_matmul_precision("medium")


def agree(value: Any, world: World) -> Any:
    """Broadcast the first rank's value over the CPU, without waiting for the GPU's
    queue.
    """
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def on_first(act: Callable[[], Found], world: World) -> Found:
    """Call user code on the first rank, and broadcast its result.

    Raises:
        OwnCodeError: on every rank, if the first one raised it.
    """
    result: Found | None = None
    error: OwnCodeError | None = None
    if world.is_first:
        try:
            result = act()
        except OwnCodeError as raised:
            error = raised
    broadcast, message = agree((result, None if error is None else str(error)), world)
    if message is not None:
        raise OwnCodeError(message) from error
    broadcast_result: Found = broadcast
    return broadcast_result


def max_over_ranks(value: float, world: World) -> float:
    """Maximum over all ranks; runs over the CPU, without waiting for the GPU's
    queue.
    """
    if world.size == 1:
        return value
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box.item())


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """Sum of a vector or matrix over all shares of a batch."""
    summed, _ = sum_with_flag(values.flatten(), False, world)
    return summed.view_as(values)


def sum_with_flag(values: Tensor, flag: bool, world: World) -> tuple[Tensor, Tensor]:
    """Sum of a vector over all shares of a batch, and the number of ranks with a flag, a
    scalar of its dtype, in one collective.
    """
    if not world.counts:
        values = torch.zeros_like(values)
    summed = torch.cat((values, values.new_full((1,), float(flag))))
    if world.size > 1:
        dist.all_reduce(summed)
    return summed[:-1], summed[-1]


@contextmanager
def single_process() -> Iterator[World]:
    """Join a process group of one, with a private in-memory store; the environment's
    ranks return afterwards.
    """
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    store = dist.HashStore()  # type: ignore[attr-defined]
    with in_environment(ranks), process_group(store=store) as world:
        yield world
