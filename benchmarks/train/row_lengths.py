"""`gristmill bench forms`: what a process keeps of a long row for the backward pass, where others share its tokens.

`python -m benchmarks.train.row_lengths FILE RANKS` measures all lengths on so many processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.train.forked_ranks import fork_ranks, load_all, measured_by
from gristmill.core.files import write_json
from gristmill.mixtures.engine import Parallel
from gristmill.mixtures.model import Model
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.losses import next_tokens, weighted_nll
from gristmill.train.parallel.context_parallel import TokenHead
from gristmill.train.parallel.process_groups import World, make_world, process_group
from gristmill.train.parallel.sharding import split_rows

LENGTHS = (2048, 8192, 32_768)
RANKS = (1, 2, 4)
MODEL = Model(layers=2, width=256, heads=8, kv_heads=2, ffn_width=704)
VOCAB = 512
Row = dict[str, Any]


def rows() -> Iterator[Row]:
    """Measure; `ours` is the fullest process's, `peer` that of one process with whole rows."""
    found = {ranks: measured_by("benchmarks.train.row_lengths", ranks) for ranks in RANKS}
    for length in map(str, LENGTHS):
        alone = found[1][length]
        for ranks in RANKS[1:]:
            ours = found[ranks][length]
            yield {
                "name": f"row of {int(length):,} tokens, context {ranks}",
                "ours": ours["kept"] / 1e6,
                "peer": alone["kept"] / 1e6,
                "unit": "MB",
                "ratio": ours["kept"] / alone["kept"],
                "note": "kept for the backward pass, less is better; loss differs by "
                f"{abs(ours['loss'] - alone['loss']):.1e}",
            }


def measure_all(file: Path) -> None:
    """One process's part."""
    with process_group() as joined:
        world = make_world(Parallel(context=joined.size), joined.device)
        found = {str(length): measure(world, length) for length in LENGTHS}
        if world.is_first:
            write_json(file, found)


def measure(world: World, length: int) -> dict[str, float]:
    """One row forward: what is kept, weights left out, and the loss."""
    shape, kept = shape_of(MODEL, VOCAB, length), dict[int, int]()
    model, tensor_of = Llama(shape), drawn(shape, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensor_of(name, parameter.shape))
    if world.row_split is not None:
        split_rows(model, world.row_split)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
    targets = next_tokens(ids)
    head = TokenHead(weighted_nll, {"targets": targets, "weights": torch.full(targets.shape, 1 / (length - 1))})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = model(ids, head)
    found = torch.tensor([float(sum(kept.values())), loss.item()], dtype=torch.float64)
    everybody = [torch.zeros_like(found) for _ in range(world.size)]
    dist.all_gather(everybody, found)
    fullest, losses = torch.stack(everybody).unbind(dim=1)
    return {"kept": float(fullest.max()), "loss": float(losses.sum())}


if __name__ == "__main__":
    load_all()
    fork_ranks(int(sys.argv[2]), partial(measure_all, Path(sys.argv[1])))
