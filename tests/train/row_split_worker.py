"""What test_row_split.py starts: a model whose rows lie with several processes, beside the same one whole.

The arguments are how many processes, a file to write how far they are apart, and what is compiled of theirs. The file:
of each process variant -> name -> largest difference, over the largest value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.train.forked_ranks import fork_ranks, load_all
from gristmill.core.files import write_json
from gristmill.mixtures.engine import Compute, Parallel
from gristmill.mixtures.model import Model
from gristmill.train.models import attention
from gristmill.train.models.decoder import Llama, configure
from gristmill.train.models.experts import MixtureOfExperts, expert_loads
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, score_tokens, targets_only, weighted_nll
from gristmill.train.parallel.context_parallel import TokenHead
from gristmill.train.parallel.process_groups import World, make_world, process_group
from gristmill.train.parallel.sharding import split_rows

SHAPE = shape_of(Model(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48), vocab_size=100, sequence_length=48)
LENGTH = 48
DOCUMENTS = ((5, 20, 23), (48,), (1, 1, 40))
"""Lengths of the documents of each row; the last one has padding."""
HEADS: dict[str, Callable[..., Any]] = {"all": weighted_nll, "some": partial(targets_only, weighted_nll)}


def positions() -> Tensor:
    """(rows, LENGTH) of each token in its document, negative for padding."""
    found = torch.full((len(DOCUMENTS), LENGTH), -1)
    for row, lengths in enumerate(DOCUMENTS):
        counted = torch.cat([torch.arange(one) for one in lengths])
        found[row, : len(counted)] = counted
    return found


VARIANTS: dict[str, tuple[Shape, dict[str, Any], int, str]] = {
    "whole rows": (SHAPE, {}, 1, "all"),
    "whole rows of 45 tokens": (replace(SHAPE, sequence_length=45), {}, 1, "all"),
    "documents one by one": (SHAPE, {"positions": positions()}, 1, "all"),
    "documents by a mask": (SHAPE, {"positions": positions()}, 1000, "all"),
    "some targets": (SHAPE, {"positions": positions()}, 1, "some"),
    "prefixes": (
        replace(SHAPE, prefix_lm=True),
        {"positions": positions(), "prefix": torch.arange(LENGTH).expand(3, -1) % 20 < 9},
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
"""Name -> the model, what it is called with besides, LEAST_MEAN_LENGTH, and where it is trained."""


def model_of(shape: Shape) -> Llama:
    """With weights larger than the first ones, so that a mistake shows."""
    model, tensor_of = Llama(shape), drawn(shape, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensor_of(name, parameter.shape) * (8.0 if parameter.ndim > 1 else 1.0))
    return model


def measure(model: Llama, asked: dict[str, Any], trains: str) -> dict[str, Any]:
    """The loss, its gradients, what each token's is, how busy experts are, and what a head of whole rows finds."""
    ids = torch.randint(
        0, 100, (len(DOCUMENTS), model.shape.sequence_length), generator=torch.Generator().manual_seed(5)
    )
    targets = next_tokens(ids)
    if trains == "some":  # all near the front of rows: some processes have none
        targets[:, 7:] = -100
    weights = (targets >= 0) * torch.linspace(0.5, 1.0, ids.shape[1])
    head = TokenHead(HEADS[trains], {"targets": targets, "weights": weights})
    loss, nll = model(ids, head, trained=weights.sum(dim=1), **asked)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    loads = expert_loads(model)
    with torch.no_grad():
        scored, _ = model(ids, TokenHead(score_tokens, {"targets": targets}), **asked)
        logits = model(ids, **asked)
    return {
        "loss": loss.detach(),
        "gradients": torch.cat([one.flatten() for one in gradients]),
        "nll": nll,
        "scored": scored,
        "logits": logits,
        "loads": torch.cat(loads) if loads else torch.zeros(1),
    }


def compare(world: World, variant: str, compute: Compute) -> dict[str, float]:
    """How far what the processes find together is from what one finds alone."""
    shape, asked, attention.LEAST_MEAN_LENGTH, trains = VARIANTS[variant]
    alone, together = model_of(shape), model_of(shape)
    assert world.row_split is not None
    split_rows(together, world.row_split)
    configure(together, compute)
    assert all(module.row_split for module in together.modules() if isinstance(module, MixtureOfExperts))
    expected, found = measure(alone, asked, trains), measure(together, asked, trains)
    for name in ("loss", "gradients"):
        dist.all_reduce(found[name], group=world.row_split.group)
    return {
        name: float((found[name].double() - value.double()).abs().max() / value.abs().max().clamp(min=1e-9))
        for name, value in expected.items()
    }


def compare_all(file: Path, compute: Compute) -> None:
    """One process's part."""
    with process_group() as joined:
        world = make_world(Parallel(context=joined.size), joined.device)
        # PyTorch compiles the grouped product of experts on a CPU in bfloat16 alone, in one process too.
        found = {
            variant: compare(world, variant, compute)
            for variant, (shape, *_) in VARIANTS.items()
            if compute.compile == "off" or not shape.experts
        }
        everybody: list[Any] = [None] * world.size
        dist.all_gather_object(everybody, found)
        if joined.is_first:
            write_json(file, everybody)


if __name__ == "__main__":
    load_all()
    compute = Compute.model_validate({"compile": sys.argv[3]})
    fork_ranks(int(sys.argv[1]), partial(compare_all, Path(sys.argv[2]), compute))
