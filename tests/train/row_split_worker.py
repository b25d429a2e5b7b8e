"""Program started by test_row_split.py: a model whose rows are split among processes,
against the unsplit model.

Arguments: the number of processes, the file to write, and `compute.compile`. The file
has, for each process, variant -> name -> largest difference relative to the largest
value.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.train.forked_ranks import fork_ranks, load_all
from gristmill.core.files import write_json
from gristmill.mixtures.schema.engine import Compute, Parallel
from gristmill.mixtures.schema.model import Model
from gristmill.train.distributed.context_parallel import TokenHead
from gristmill.train.distributed.fsdp import split_rows
from gristmill.train.distributed.process_groups import World, make_world, process_group
from gristmill.train.models import attention
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.moe import MixtureOfExperts, expert_loads
from gristmill.train.models.transformer import Llama, configure
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import (
    next_tokens,
    score_tokens,
    weighted_nll,
)

SHAPE = shape_of(
    Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48),
    vocab_size=100,
    sequence_length=48,
)
LENGTH = 48
DOCUMENTS = ((5, 20, 23), (48,), (1, 1, 40))
"""Lengths of the documents of each row; the last one has padding."""


def positions() -> Tensor:
    """(rows, LENGTH) of each token in its document, negative for padding."""
    table = torch.full((len(DOCUMENTS), LENGTH), -1)
    for row, lengths in enumerate(DOCUMENTS):
        row_positions = torch.cat([torch.arange(length) for length in lengths])
        table[row, : len(row_positions)] = row_positions
    return table


VARIANTS: dict[str, tuple[Shape, dict[str, Any], int, str]] = {
    "whole rows": (SHAPE, {}, 1, "all"),
    "whole rows of 45 tokens": (replace(SHAPE, sequence_length=45), {}, 1, "all"),
    "documents one by one": (SHAPE, {"positions": positions()}, 1, "all"),
    "documents by a mask": (SHAPE, {"positions": positions()}, 1000, "all"),
    "some targets": (SHAPE, {"positions": positions()}, 1, "some"),
    "prefixes": (
        replace(SHAPE, prefix_lm=True),
        {
            "positions": positions(),
            "prefix": torch.arange(LENGTH).expand(3, -1) % 20 < 9,
        },
        1,
        "all",
    ),
    "experts": (
        replace(SHAPE, experts=4, experts_per_token=2, load_balancing=1.0),
        {"positions": positions()},
        1,
        "all",
    ),
}
"""Name -> (shape, further arguments of the model, LEAST_MEAN_LENGTH, trained
targets).
"""


def model_of(shape: Shape) -> Llama:
    """Make a model with weights larger than the initial ones, so that a mistake
    shows.
    """
    model, tensor_of = Llama(shape), drawn(shape, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                tensor_of(name, parameter.shape) * (8.0 if parameter.ndim > 1 else 1.0)
            )
    return model


def measure(model: Llama, options: dict[str, Any], trains: str) -> dict[str, Any]:
    """Compute the loss, gradients, loss of each token, expert loads, scores and
    logits.
    """
    ids = torch.randint(
        0,
        100,
        (len(DOCUMENTS), model.shape.sequence_length),
        generator=torch.Generator().manual_seed(5),
    )
    targets = next_tokens(ids)
    if trains == "some":  # all near the start of rows, so that some processes have none
        targets[:, 7:] = -100
    weights = (targets >= 0) * torch.linspace(0.5, 1.0, ids.shape[1])
    head = TokenHead(
        weighted_nll, {"targets": targets, "weights": weights}, trains == "some"
    )
    loss, nll = model(ids, head, trained=weights.sum(dim=1), **options)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    loads = expert_loads(model)
    with torch.no_grad():
        scored, _ = model(ids, TokenHead(score_tokens, {"targets": targets}), **options)
        logits = model(ids, **options)
    return {
        "loss": loss.detach(),
        "gradients": torch.cat([gradient.flatten() for gradient in gradients]),
        "nll": nll,
        "scored": scored,
        "logits": logits,
        "loads": torch.cat(loads) if loads else torch.zeros(1),
    }


def compare(world: World, variant: str, compute: Compute) -> dict[str, float]:
    """Return the largest relative difference between the split and the unsplit model,
    by name.
    """
    shape, options, attention.LEAST_MEAN_LENGTH, trains = VARIANTS[variant]
    alone, together = model_of(shape), model_of(shape)
    assert world.row_split is not None
    split_rows(together, world.row_split)
    configure(together, compute)
    assert all(
        module.row_split
        for module in together.modules()
        if isinstance(module, MixtureOfExperts)
    )
    expected, split_values = (
        measure(alone, options, trains),
        measure(together, options, trains),
    )
    for name in ("loss", "gradients"):
        dist.all_reduce(split_values[name], group=world.row_split.group)
    return {
        name: float(
            (split_values[name].double() - value.double()).abs().max()
            / value.abs().max().clamp(min=1e-9)
        )
        for name, value in expected.items()
    }


def compare_all(file: Path, compute: Compute) -> None:
    """Compare all variants in one process of the group."""
    with process_group() as joined:
        world = make_world(Parallel(context=joined.size), joined.device)
        # On a CPU, PyTorch compiles the grouped product of experts in bfloat16 only.
        differences = {
            variant: compare(world, variant, compute)
            for variant, (shape, *_) in VARIANTS.items()
            if compute.compile == "off" or not shape.experts
        }
        all_differences: list[Any] = [None] * world.size
        dist.all_gather_object(all_differences, differences)
        if joined.is_first:
            write_json(file, all_differences)


if __name__ == "__main__":
    load_all()
    compute = Compute.model_validate({"compile": sys.argv[3]})
    fork_ranks(int(sys.argv[1]), partial(compare_all, Path(sys.argv[2]), compute))
