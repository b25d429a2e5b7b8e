"""`gristmill bench optimizers`: seconds of an update of the layers' matrices by Muon
and its kin, in one process and shared by two, beside PyTorch's Muon.

`python -m benchmarks.train.optimizer_steps FILE RANKS` measures on that many processes.
Each matrix of PyTorch's Muon is orthogonalised by itself, and by every process; its
step is not guarded against bad steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.measuring import Row, cost_row, fastest
from benchmarks.train.forked_ranks import (
    fork_ranks,
    load_all,
    measured_by,
    write_measurements,
)
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.optimizer import Optimizer, OptimizerKind
from gristmill.train.distributed.fsdp import sharded_model
from gristmill.train.distributed.process_groups import World
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.optim.optimizer import make_optimizers, parameters_of, update

SECTION = Model(layers=12, width=256, heads=4, kv_heads=4)
VOCAB, LENGTH, REPEATS = 256, 64, 5
KINDS: tuple[OptimizerKind, ...] = ("muon", "normuon", "soap_muon")
PEER = "torch.optim.Muon"


def rows() -> Iterator[Row]:
    """Measure; the ratio is the peer's time over ours."""
    for ranks in (1, 2):
        seconds: dict[str, float] = measured_by(
            "benchmarks.train.optimizer_steps", ranks
        )
        for kind in KINDS:
            yield cost_row(
                f"update of {kind}, {ranks} ranks, vs torch.optim.Muon",
                seconds[kind],
                seconds[PEER],
                "s",
                f"{SECTION.layers} layers of width {SECTION.width}, a thread per rank",
            )


def measure(world: World) -> dict[str, float]:
    """Return the seconds of an update by each kind, and by PyTorch's Muon."""
    shape = shape_of(SECTION, VOCAB, LENGTH)
    model = sharded_model(shape, drawn(shape, 0), world, torch.float32)
    good = torch.tensor(False)

    def prepare() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()

    optimizers = {
        kind: make_optimizers(model, Optimizer(kind=kind))[:1] for kind in KINDS
    }
    matrices = list(parameters_of(optimizers["muon"][0]))
    peer = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
    seconds = fastest(
        REPEATS,
        peer.step,
        *(partial(update, optimizers[kind], 1e-3, good) for kind in KINDS),
        before=prepare,
        warmups=2,
    )
    return dict(zip((PEER, *KINDS), seconds, strict=True))


if __name__ == "__main__":
    load_all()
    fork_ranks(
        int(sys.argv[2]),
        partial(write_measurements, measure, Path(sys.argv[1])),
    )
