"""Every way to spread a training over some GPUs, with what it needs and how long a step takes; the best first.

The time of a step is a model, not a promise:

- arithmetic: the step's operations over the peak of all GPUs times the utilisation that a form without waiting reaches;
- recomputing the forward pass, where activations are forgotten: a third more;
- the pipeline's bubble under 1F1B: (p - 1) / m more for p stages and m micro-batches (Narayanan et al. 2021, 2.2.1);
- tensor parallelism's collectives, which nothing hides: eight per layer and micro-batch, four forward and four
  backward, each of the residual stream (Korthikanti et al. 2022, 4.2.2);
- context parallelism's, which nothing hides either: keys and values of all tokens gathered in every layer, and their
  gradients reduced;
- tokens that are sent to experts and back, forward and backward, where these are dealt;
- FSDP's gathers and reductions, hidden behind the arithmetic as far as that lasts;
- moments that lie in host memory: their way to the GPU and back, which nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gristmill.train.models.shape import CHUNKS, Shape
from gristmill.train.planning.devices import Device
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.planning.memory import (
    MASTER_BYTES,
    Form,
    Load,
    Memory,
    block_parameters,
    gathered_parameters,
    moments_bytes,
    rank_memory,
)

GPUS_PER_MACHINE = 8
NETWORK = 50e9
"""Bytes per second, GPU and direction between machines: 400 Gb/s InfiniBand, one port a GPU, as in DGX H100."""
HOST_LINK = 32e9
"""Bytes per second between a GPU and its host, and between GPUs of which nothing is known: PCI Express 4, 16 lanes."""
RECOMPUTE = 4 / 3
COLLECTIVES_PER_LAYER = 8


@dataclass(frozen=True)
class Step:
    """What is computed between two updates.

    Attributes:
        rows, length: of the whole batch.
        optimizer: its kind.
        compute_bytes: of a number in matrix products.
        most_micro_rows: rows per forward pass at the most; None: whatever fits.
        offload: whether moments lie in host memory.
    """

    rows: int
    length: int
    optimizer: str = "adamw"
    compute_bytes: int = 2
    most_micro_rows: int | None = None
    offload: bool = False


@dataclass(frozen=True)
class Candidate:
    """One form with its best micro-batch.

    Attributes:
        form, load: how it is spread and cut.
        memory: of the fullest rank.
        host_memory: bytes of moments that the fullest rank keeps in its host's memory.
        fits: whether the device holds that.
        bubble: share of the time in which a rank waits for the pipeline.
        seconds: of a step.
        utilisation: MFU over all of it, attention counted whole.
    """

    form: Form
    load: Load
    memory: Memory
    host_memory: float
    fits: bool
    bubble: float
    seconds: float
    utilisation: float


def rank_forms(shape: Shape, step: Step, gpus: int, device: Device, utilisation: float) -> list[Candidate]:
    """All forms for a number of GPUs: those that fit by time, then the others by how much they lack.

    Args:
        shape: the model.
        step: the batch.
        gpus: how many.
        device: of which kind.
        utilisation: MFU of the arithmetic alone, between 0 and 1.
    """
    best = [
        _best([_candidate(shape, form, load, step, device, utilisation) for load in _loads(form, step)], device)
        for form in forms(shape, gpus, step.rows, step.length)
    ]
    return sorted(best, key=lambda one: (not one.fits, _rounded(one.seconds) if one.fits else 0.0, one.memory.total))


def forms(shape: Shape, gpus: int, rows: int, length: int) -> Iterator[Form]:
    """The products that are a number of GPUs, and that the model and the batch can be cut into.

    A tensor group stays within a machine and takes whole key/value heads; a pipeline has a layer per stage and a
    micro-batch per stage at least; rows are split within a machine, into two chunks per process, where lengths divide.
    None of these is had but of a plain decoder, and the first two not with experts, which may be dealt to the ranks
    that share weights.
    """
    splits = shape.is_plain_decoder and not shape.experts
    for tensor in _divisors(gpus) if splits else [1]:
        if tensor > GPUS_PER_MACHINE or shape.kv_heads % tensor or shape.ffn_width % tensor:
            continue
        for pipeline in _divisors(gpus // tensor):
            if pipeline > (shape.layers if splits else 1):
                continue
            for context in _divisors(gpus // tensor // pipeline) if shape.is_plain_decoder else [1]:
                data = gpus // tensor // pipeline // context
                if (
                    rows % data
                    or rows // data < pipeline
                    or tensor * context > GPUS_PER_MACHINE
                    or (context > 1 and length % (CHUNKS * context * tensor))
                ):
                    continue
                for shard in _divisors(data):
                    form = Form(data // shard, shard, tensor, pipeline, context)
                    yield form
                    if shape.experts and form.weights > 1 and shape.experts % form.weights == 0:
                        yield replace(form, deal_experts=True)


def _loads(form: Form, step: Step) -> Iterator[Load]:
    rows = step.rows // form.data
    most = min(rows // form.pipeline, step.most_micro_rows or rows)
    for micro in (size for size in _divisors(rows) if size <= most):
        for checkpointing in (False, True):
            yield Load(
                micro, step.length, rows // micro, step.compute_bytes, step.optimizer, checkpointing, step.offload
            )


def _candidate(shape: Shape, form: Form, load: Load, step: Step, device: Device, utilisation: float) -> Candidate:
    memory = rank_memory(shape, form, load)
    arithmetic = flops_per_token(shape, step.length).whole * step.rows * step.length / (form.world * device.flops)
    busy = arithmetic / utilisation * (RECOMPUTE if load.checkpointing else 1.0)
    waiting = busy * (form.pipeline - 1) / load.micro_batches
    seconds = (
        busy
        + waiting
        + _tensor_seconds(shape, form, load, device)
        + _context_seconds(shape, form, load, device)
        + _dealing_seconds(shape, form, load, device)
    )
    seconds += max(0.0, _sharding_seconds(shape, form, load, device) - busy)
    _, on_host = moments_bytes(shape, form, load)
    seconds += 2 * on_host / HOST_LINK
    return Candidate(
        form,
        load,
        memory,
        on_host,
        memory.total <= device.memory,
        waiting / (busy + waiting),
        seconds,
        arithmetic / seconds,
    )


def _tensor_seconds(shape: Shape, form: Form, load: Load, device: Device) -> float:
    """Collectives of the tensor groups in a step; the fullest stage's layers."""
    tokens = load.micro_rows * load.length / form.context
    moved = tokens * shape.width * load.compute_bytes * (form.tensor - 1) / form.tensor
    layers = -(-shape.layers // form.pipeline)
    return COLLECTIVES_PER_LAYER * layers * load.micro_batches * moved / device.link


def _context_seconds(shape: Shape, form: Form, load: Load, device: Device) -> float:
    """Keys and values gathered in a step's forward passes, again where they are forgotten, and reduced backward."""
    narrow = 2 * shape.kv_heads * shape.head_width / form.tensor
    moved = load.micro_rows * load.length * narrow * load.compute_bytes * (form.context - 1) / form.context
    times = (3 if load.checkpointing else 2) * -(-shape.layers // form.pipeline) * load.micro_batches
    return times * moved / device.link


def _dealing_seconds(shape: Shape, form: Form, load: Load, device: Device) -> float:
    """Tokens sent to experts and back in a step, and as much backward; again where activations are forgotten."""
    if not form.deal_experts:
        return 0.0
    numbers = load.micro_rows * load.length / form.context * shape.experts_per_token * shape.width
    moved = numbers * load.compute_bytes * (form.weights - 1) / form.weights
    times = (6 if load.checkpointing else 4) * shape.layers * load.micro_batches
    return times * moved / (device.link if form.weights <= GPUS_PER_MACHINE else NETWORK)


def _sharding_seconds(shape: Shape, form: Form, load: Load, device: Device) -> float:
    """Weights gathered twice and gradients reduced once per micro-batch, and summed over the replicas once per step."""
    layers = -(-shape.layers // form.pipeline)
    gathered = layers * gathered_parameters(shape, form)
    weights = layers * block_parameters(shape) / form.tensor
    share = (form.weights - 1) / form.weights
    within = form.tensor * form.pipeline * form.weights <= GPUS_PER_MACHINE
    moved = gathered * share * load.micro_batches * (2 * load.compute_bytes + MASTER_BYTES)
    seconds = moved / (device.link if within else NETWORK)
    if form.replicate > 1:
        whole = form.world <= GPUS_PER_MACHINE
        summed = 2 * MASTER_BYTES * weights / form.weights * (form.replicate - 1) / form.replicate
        seconds += summed / (device.link if whole else NETWORK)
    return seconds


def _best(candidates: list[Candidate], device: Device) -> Candidate:
    """The fastest that fits, the larger micro-batch at the same time; or what lacks the least memory."""
    fitting = [one for one in candidates if one.fits]
    if not fitting:
        return min(candidates, key=lambda one: one.memory.total)
    return min(fitting, key=lambda one: (round(one.seconds, 9), -one.load.micro_rows))


def _rounded(seconds: float) -> float:
    """To what the model can tell apart, about a percent: of forms that are equally fast the one with room is better."""
    return float(f"{seconds:.2g}")


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
