"""`gristmill bench forms`: bytes of a model's rounded frozen matrices that a process
holds if others share them.

`python -m benchmarks.train.rounded_shares FILE RANKS` measures all roundings on that
many processes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch

from benchmarks.measuring import Row, row
from benchmarks.train.forked_ranks import (
    fork_ranks,
    load_all,
    measured_by,
    write_measurements,
)
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import Parallel
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.posttraining import Lora
from gristmill.train.adapters.lora import describe_rounding, tuned_model
from gristmill.train.distributed.process_groups import World, make_world
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn

BASES = ("int8", "nf4")
RANKS = (1, 2, 4)
MODEL = Model(layers=4, width=512, heads=8, kv_heads=2, ffn_width=1408)
VOCAB, LENGTH = 512, 64


def rows() -> Iterator[Row]:
    """Measure; ours is what each process holds, the peer what a single process does."""
    by_ranks = {
        ranks: measured_by("benchmarks.train.rounded_shares", ranks) for ranks in RANKS
    }
    for base in BASES:
        alone = by_ranks[1][base]
        for ranks in RANKS[1:]:
            ours = by_ranks[ranks][base]
            verb = "are" if ours["logits"] == alone["logits"] else "are NOT"
            yield row(
                f"rounded base, {base}, {ranks} processes",
                ours["bytes"] / 1e6,
                alone["bytes"] / 1e6,
                "MB",
                f"frozen matrices on each, less is better; logits {verb} those of "
                "one to the last bit",
            )


class Rounded(TypedDict):
    """A model's rounded matrices in a process: their bytes, and a hash of its
    logits.
    """

    bytes: int
    logits: str


def measure_all(folder: Path, joined: World) -> dict[str, Rounded]:
    """Measure all roundings in one rank."""
    world = make_world(Parallel(), joined.device)
    return {base: measure(world, base, folder) for base in BASES}


def measure(world: World, base: str, folder: Path) -> Rounded:
    """Measure a model in this process."""
    shape, lora = (
        shape_of(MODEL, VOCAB, LENGTH),
        Lora.model_validate({"rank": 4, "base": base}),
    )
    model = tuned_model(
        shape,
        drawn(shape, 0),
        lora,
        0,
        world,
        torch.float32,
        Context(folder, emit=lambda event: None),
    )
    ids = torch.randint(
        0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        logits = model(ids)
    rounding = describe_rounding(model, lora)
    assert rounding is not None
    return {
        "bytes": rounding["bytes"],
        "logits": hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest(),
    }


if __name__ == "__main__":
    load_all()
    file = Path(sys.argv[1])
    fork_ranks(
        int(sys.argv[2]),
        partial(write_measurements, partial(measure_all, file.parent), file),
    )
