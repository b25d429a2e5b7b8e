"""`gristmill bench forms`: what a process holds of a model's frozen matrices that are rounded, where others share them.

`python -m benchmarks.train.rounded_shares FILE RANKS` measures all roundings on so many processes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.forked_ranks import fork_ranks, load_all, measured_by
from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.engine import Parallel
from gristmill.mixtures.model import Model
from gristmill.mixtures.posttraining import Lora
from gristmill.train.adapters.lora import describe_rounding, tuned_model
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.parallel.process_groups import World, make_world, process_group

BASES = ("int8", "nf4")
RANKS = (1, 2, 4)
MODEL = Model(layers=4, width=512, heads=8, kv_heads=2, ffn_width=1408)
VOCAB, LENGTH = 512, 64
Row = dict[str, Any]


def rows() -> Iterator[Row]:
    """Measure; `ours` is what each process holds, `peer` what one process does."""
    found = {ranks: measured_by("benchmarks.train.rounded_shares", ranks) for ranks in RANKS}
    for base in BASES:
        alone = found[1][base]
        for ranks in RANKS[1:]:
            ours = found[ranks][base]
            same = "are" if ours["logits"] == alone["logits"] else "are NOT"
            yield {
                "name": f"rounded base, {base}, {ranks} processes",
                "ours": ours["bytes"] / 1e6,
                "peer": alone["bytes"] / 1e6,
                "unit": "MB",
                "ratio": ours["bytes"] / alone["bytes"],
                "note": f"frozen matrices on each, less is better; logits {same} those of one to the last bit",
            }


def measure_all(file: Path) -> None:
    """One process's part."""
    with process_group() as joined:
        world = make_world(Parallel(), joined.device)
        found = {base: measure(world, base, file.parent) for base in BASES}
        if world.is_first:
            write_json(file, found)


def measure(world: World, base: str, folder: Path) -> dict[str, Any]:
    """A model with adapters on rounded matrices: what these take here, and what it computes."""
    shape, lora = shape_of(MODEL, VOCAB, LENGTH), Lora.model_validate({"rank": 4, "base": base})
    model = tuned_model(shape, drawn(shape, 0), lora, 0, world, torch.float32, Context(folder, emit=lambda event: None))
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids)
    return {
        "bytes": describe_rounding(model, lora)["lora_base"]["bytes"],
        "logits": hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest(),
    }


if __name__ == "__main__":
    load_all()
    fork_ranks(int(sys.argv[2]), partial(measure_all, Path(sys.argv[1])))
