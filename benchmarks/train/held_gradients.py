"""`gristmill bench forms`: bytes of gradients that a process holds between the
micro-batches of a step.

`python -m benchmarks.train.held_gradients FILE RANKS` measures all forms on that many
processes, after a single process, whose gradients theirs must equal.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measuring import Row, row
from benchmarks.train.forked_ranks import (
    fork_ranks,
    load_all,
    measured_by,
    write_measurements,
)
from benchmarks.train.parallel_forms import label
from benchmarks.train.small_models import next_token, random_packed_set
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import Parallel
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.posttraining import Lora
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.lora import tuned_model
from gristmill.train.distributed.fsdp import gathered
from gristmill.train.distributed.process_groups import (
    World,
    make_world,
    max_over_ranks,
    process_group,
)
from gristmill.train.loop.batch_plan import micro_batches
from gristmill.train.loop.step import accumulate_gradients
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.optim.dtensor_sums import local

RANKS = 4
FORMS: dict[str, list[dict[str, int]]] = {
    "dense": [{"shard": 4}, {"context": 4}, {"replicate": 2, "shard": 2}],
    "adapters": [{"shard": 4}],
}
"""Kind of model -> its parallel forms."""
ADAPTER_RANK = 64
VOCAB, LENGTH, WIDTH = 256, 16, 256
MICRO_BATCHES = 8
GRADIENT_BYTES = 4.0


def rows() -> Iterator[Row]:
    """Measure; ours is what the fullest process holds per trained weight of the model,
    the peer all of it in float32.
    """
    for name, form in held_gradients().items():
        yield row(
            f"held gradients, {name}",
            form["bytes_per_weight"],
            GRADIENT_BYTES,
            "bytes per weight",
            f"before the last micro-batch on {RANKS} processes, less is better; "
            f"gradients differ by {form['difference']:.1e} of their norm",
        )


def held_gradients() -> dict[str, dict[str, float]]:
    """Return `bytes_per_weight` of the fullest process for each form, and the
    `difference` from a single process's gradients, as a share of their norm.
    """
    by_form: dict[str, dict[str, float]] = measured_by(
        "benchmarks.train.held_gradients", RANKS
    )
    return by_form


def measure_alone(folder: Path) -> None:
    """Write the gradients of a single process."""
    with process_group() as world:
        for kind in FORMS:
            model = _model(kind, world, folder)
            _accumulate(model, world, folder)
            gradients = {
                name: weight.grad
                for name, weight in model.named_parameters()
                if weight.grad is not None
            }
            torch.save(gradients, folder / f"{kind}.pt")


def measure_all(folder: Path, joined: World) -> dict[str, dict[str, float]]:
    """Measure all forms in one rank."""
    by_form = {}
    for kind, forms in FORMS.items():
        for form in forms:
            name = label(form) if kind == "dense" else f"{kind}, {label(form)}"
            world = make_world(Parallel.model_validate(form), joined.device)
            by_form[name] = _measure(kind, world, folder)
    return by_form


def _measure(kind: str, world: World, folder: Path) -> dict[str, float]:
    model, alone = _model(kind, world, folder), torch.load(folder / f"{kind}.pt")
    held_bytes = _accumulate(model, world, folder)
    trained_weights = sum(gradient.numel() for gradient in alone.values())
    norm = torch.stack([gradient.norm() for gradient in alone.values()]).norm()
    differences = [
        (gathered(weight.grad) - alone[name]).norm()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    ]
    return {
        "bytes_per_weight": max_over_ranks(held_bytes / trained_weights, world),
        "difference": max_over_ranks(
            float(torch.stack(differences).norm() / norm), world
        ),
    }


def _accumulate(model: nn.Module, world: World, folder: Path) -> int:
    """Compute the gradients of a step; returns the bytes that this process holds before
    the last micro-batch, and did not hold before the first one.
    """
    packed = PackedSet(folder / "mix")
    shape: Any = model.shape
    objective = next_token(packed, shape, world.device)
    batch = np.arange(RANKS * MICRO_BATCHES)
    parts = [
        objective.prepare(part)
        for part in micro_batches(batch, world.data_rank, world.data_size, 1)
    ]
    forward_passes, held_bytes = 0, 0

    def count(*_: Any) -> None:
        nonlocal forward_passes, held_bytes
        forward_passes += 1
        if forward_passes == len(parts):
            held_bytes = _tensor_bytes()

    model.register_forward_pre_hook(count, prepend=True)
    before = _tensor_bytes()
    accumulate_gradients(model, objective, parts, objective.weight(batch), world)
    packed.close()
    return held_bytes - before


def _tensor_bytes() -> int:
    """Count bytes of all tensors that Python code or a gradient refers to, each storage
    once.
    """
    gc.collect()
    tensors = [value for value in gc.get_objects() if isinstance(value, Tensor)]
    gradients = [
        tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None
    ]
    plain = [
        local(tensor)
        for tensor in (*tensors, *gradients)
        if tensor.device.type == "cpu"
    ]
    storages = [tensor.untyped_storage() for tensor in plain]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _model(kind: str, world: World, folder: Path) -> nn.Module:
    settings = Model(
        layers=4,
        width=WIDTH,
        heads=4,
        kv_heads=4,
        ffn_width=2 * WIDTH,
        tied_embeddings=False,
    )
    shape = shape_of(settings, VOCAB, LENGTH)
    lora = Lora(rank=ADAPTER_RANK) if kind == "adapters" else None
    context = Context(folder, emit=lambda event: None)
    return tuned_model(shape, drawn(shape, 0), lora, 0, world, torch.float32, context)


if __name__ == "__main__":
    load_all()
    file = Path(sys.argv[1])
    random_packed_set(file.parent / "mix", VOCAB, RANKS * MICRO_BATCHES, LENGTH).close()
    fork_ranks(1, partial(measure_alone, file.parent))
    fork_ranks(
        int(sys.argv[2]),
        partial(write_measurements, partial(measure_all, file.parent), file),
    )
