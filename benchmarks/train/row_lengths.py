"""`gristmill bench forms`: bytes of a long row that a process saves for the backward
pass if others share its tokens.

`python -m benchmarks.train.row_lengths FILE RANKS` measures all lengths on that many
processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measuring import Row, row
from benchmarks.train.forked_ranks import (
    fork_ranks,
    load_all,
    measured_by,
    write_measurements,
)
from benchmarks.train.small_models import drawn_decoder, saved_tensors
from gristmill.mixtures.schema.engine import Parallel
from gristmill.mixtures.schema.model import Model
from gristmill.train.distributed.context_parallel import TokenHead
from gristmill.train.distributed.fsdp import split_rows
from gristmill.train.distributed.process_groups import World, make_world
from gristmill.train.models.model_config import shape_of
from gristmill.train.objectives.losses import next_tokens, weighted_nll

LENGTHS = (2048, 8192, 32_768)
RANKS = (1, 2, 4)
MODEL = Model(layers=2, width=256, heads=8, kv_heads=2, ffn_width=704)
VOCAB = 512


def rows() -> Iterator[Row]:
    """Measure; ours is the fullest process's, the peer that of a single process with
    whole rows.
    """
    by_ranks = {
        ranks: measured_by("benchmarks.train.row_lengths", ranks) for ranks in RANKS
    }
    for length in map(str, LENGTHS):
        alone = by_ranks[1][length]
        for ranks in RANKS[1:]:
            ours = by_ranks[ranks][length]
            yield row(
                f"row of {int(length):,} tokens, context {ranks}",
                ours["saved_bytes"] / 1e6,
                alone["saved_bytes"] / 1e6,
                "MB",
                "kept for the backward pass, less is better; loss differs by "
                f"{abs(ours['loss'] - alone['loss']):.1e}",
            )


def measure_all(joined: World) -> dict[str, dict[str, float]]:
    """Measure all lengths in one rank."""
    world = make_world(Parallel(context=joined.size), joined.device)
    return {str(length): measure(world, length) for length in LENGTHS}


def measure(world: World, length: int) -> dict[str, float]:
    """Return the bytes that the fullest process saves for one row, weights not counted,
    and the loss.
    """
    model = drawn_decoder(shape_of(MODEL, VOCAB, length))
    if world.row_split is not None:
        split_rows(model, world.row_split)
    ids = torch.randint(
        0, VOCAB, (1, length), generator=torch.Generator().manual_seed(0)
    )
    targets = next_tokens(ids)
    head = TokenHead(
        weighted_nll,
        {"targets": targets, "weights": torch.full(targets.shape, 1 / (length - 1))},
    )
    with saved_tensors(model) as saved:
        loss, _ = model(ids, head)
    own = torch.tensor([float(sum(saved.values())), loss.item()], dtype=torch.float64)
    gathered = [torch.zeros_like(own) for _ in range(world.size)]
    dist.all_gather(gathered, own)
    saved_bytes, losses = torch.stack(gathered).unbind(dim=1)
    return {"saved_bytes": float(saved_bytes.max()), "loss": float(losses.sum())}


if __name__ == "__main__":
    load_all()
    fork_ranks(
        int(sys.argv[2]), partial(write_measurements, measure_all, Path(sys.argv[1]))
    )
