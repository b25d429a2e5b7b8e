"""All ways to distribute a training over GPUs, with memory and time per step, best
first.

The time of a step is an estimate:

- arithmetic: the step's operations over the peak of all GPUs times the utilisation of a
  form without idle time;
- recomputing the forward pass, with activation checkpointing: a third more;
- tensor parallelism's collectives, not overlapped: eight per layer and micro-batch,
  four forward and four backward, each of the residual stream (Korthikanti et al. 2022,
  4.2.2);
- context parallelism's, not overlapped either: keys and values of all tokens gathered
  in every layer, and their gradients reduced;
- FSDP's gathers and reductions, overlapped with the arithmetic up to its duration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from gristmill.train.models.model_config import CHUNKS, Shape
from gristmill.train.planning.devices import Device
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.planning.memory import (
    COMPUTE_BYTES,
    MASTER_BYTES,
    Form,
    Load,
    Memory,
    block_parameters,
    rank_memory,
)

GPUS_PER_MACHINE = 8
NETWORK = 50e9
"""Bytes per second and direction per GPU between machines: 400 Gb/s InfiniBand, one
port a GPU, as in DGX H100.
"""
UNKNOWN_LINK = 32e9
"""Bytes per second between unknown GPUs: PCI Express 4, 16 lanes."""
RECOMPUTE = 4 / 3
COLLECTIVES_PER_LAYER = 8


@dataclass(frozen=True)
class Step:
    """Computation between two updates.

    Attributes:
        rows, length: of the global batch.
        optimizer: kind of optimizer.
    """

    rows: int
    length: int
    optimizer: str = "adamw"


@dataclass(frozen=True)
class Candidate:
    """A parallel form with its best micro-batch.

    Attributes:
        form, load: distribution and micro-batches.
        memory: of the fullest rank.
        fits: True if the device has enough memory.
        seconds: of a step.
        utilisation: MFU over the full step, with non-causal attention.
    """

    form: Form
    load: Load
    memory: Memory
    fits: bool
    seconds: float
    utilisation: float


def rank_forms(
    shape: Shape, step: Step, gpus: int, device: Device, utilisation: float
) -> list[Candidate]:
    """Rank all forms for a number of GPUs: those that fit by time, then the others by
    missing memory.

    Args:
        shape: the model.
        step: the batch.
        gpus: number of GPUs.
        device: kind of GPU.
        utilisation: MFU of the arithmetic alone, between 0 and 1.
    """
    best = []
    for form in forms(shape, gpus, step.rows, step.length):
        rows = step.rows // form.data
        loads = [
            Load(
                micro,
                step.length,
                rows // micro,
                optimizer=step.optimizer,
                checkpointing=checkpointing,
            )
            for micro, checkpointing in product(_divisors(rows), (False, True))
        ]
        candidates = [
            _candidate(shape, form, load, step, device, utilisation) for load in loads
        ]
        # The fastest that fits, of equal ones the larger micro-batch; else the one that
        # needs the least memory.
        best.append(
            min(
                (candidate for candidate in candidates if candidate.fits),
                key=lambda candidate: (
                    round(candidate.seconds, 9),
                    -candidate.load.micro_rows,
                ),
                default=None,
            )
            or min(candidates, key=lambda candidate: candidate.memory.total)
        )
    # To the precision of the estimate, about a percent, so that memory decides between
    # equally fast forms.
    return sorted(
        best,
        key=lambda candidate: (
            not candidate.fits,
            float(f"{candidate.seconds:.2g}") if candidate.fits else 0.0,
            candidate.memory.total,
        ),
    )


def forms(shape: Shape, gpus: int, rows: int, length: int) -> Iterator[Form]:
    """Yield all factorisations of the number of GPUs that divide the model and the
    batch.

    A tensor group stays within a machine and has full key/value heads; context
    parallelism splits rows within a machine, into two chunks per process, if lengths
    divide. Both need a plain decoder, and the first one without experts.
    """
    split_matrices = not (shape.prefix_lm or shape.experts)
    for tensor in _divisors(gpus) if split_matrices else [1]:
        if (
            tensor > GPUS_PER_MACHINE
            or shape.kv_heads % tensor
            or shape.ffn_width % tensor
        ):
            continue
        for context in [1] if shape.prefix_lm else _divisors(gpus // tensor):
            data = gpus // tensor // context
            if (
                rows % data
                or tensor * context > GPUS_PER_MACHINE
                or (context > 1 and length % (CHUNKS * context * tensor))
            ):
                continue
            for shard in _divisors(data):
                yield Form(data // shard, shard, tensor, context)


def _candidate(
    shape: Shape, form: Form, load: Load, step: Step, device: Device, utilisation: float
) -> Candidate:
    memory = rank_memory(shape, form, load)
    arithmetic = (
        flops_per_token(shape, step.length).whole
        * step.rows
        * step.length
        / (form.world * device.flops)
    )
    busy = arithmetic / utilisation * (RECOMPUTE if load.checkpointing else 1.0)
    # Numbers of the residual stream of a rank's tokens.
    tokens = load.micro_rows * load.length / form.context
    in_tensor_group = (
        COLLECTIVES_PER_LAYER
        * shape.layers
        * load.micro_batches
        * (tokens * shape.width * COMPUTE_BYTES)
        * (form.tensor - 1)
        / form.tensor
        / device.link
    )
    # Keys and values gathered in forward passes, again with checkpointing, and their
    # gradients reduced.
    narrow = 2 * shape.kv_heads * shape.head_width / form.tensor
    in_context_group = (
        (3 if load.checkpointing else 2)
        * shape.layers
        * load.micro_batches
        * (tokens * narrow * COMPUTE_BYTES)
        * (form.context - 1)
        / device.link
    )
    seconds = busy + in_tensor_group + in_context_group
    seconds += max(0.0, sharding_seconds(shape, form, load, device) - busy)
    return Candidate(
        form,
        load,
        memory,
        memory.total <= device.memory,
        seconds,
        arithmetic / seconds,
    )


def _rate(gpus: int, device: Device) -> float:
    """Bytes per second between the GPUs of a group."""
    return device.link if gpus <= GPUS_PER_MACHINE else NETWORK


def sharding_seconds(shape: Shape, form: Form, load: Load, device: Device) -> float:
    """Seconds to gather weights twice and reduce gradients once per micro-batch, and to
    sum over replicas once per step.
    """
    weights = shape.layers * block_parameters(shape) / form.tensor
    gathered = weights * load.micro_batches
    share = (form.weights - 1) / form.weights
    moved = gathered * share * (2 * COMPUTE_BYTES + MASTER_BYTES)
    seconds = moved / _rate(form.tensor * form.weights, device)
    replicated = (form.replicate - 1) / form.replicate
    summed = 2 * MASTER_BYTES * weights / form.weights * replicated
    return seconds + summed / _rate(form.world, device)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
