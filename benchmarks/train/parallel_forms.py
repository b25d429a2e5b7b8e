"""`gristmill bench forms`: products of three parallel forms learn what a
single process learns.

`python -m benchmarks.train.parallel_forms FOLDER RANKS` trains every form on
that many processes, after a single process; see `forked_ranks.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.measuring import Row, row
from benchmarks.train.forked_ranks import fork_ranks, load_all, run_forking
from benchmarks.train.small_models import (
    next_token,
    pretrain_section,
    random_packed_set,
)
from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import Parallel, TrainingEngine
from gristmill.mixtures.schema.model import Model
from gristmill.tokenize.packed import PackedSet
from gristmill.train.distributed.fsdp import sharded_model, whole_tensors
from gristmill.train.distributed.process_groups import make_world, process_group
from gristmill.train.loop.training_job import Job, Learner
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.trainer import train

PRODUCTS: dict[int, list[dict[str, int]]] = {
    8: [
        {"replicate": 2, "shard": 2, "tensor": 2},
        {"shard": 2, "context": 2, "tensor": 2},
    ],
}
"""Number of processes -> products of forms."""
STEPS, LENGTH, VOCAB, BATCH = 3, 16, 128, 11
"""A batch of 11 rows cannot be divided evenly among any number of processes."""
LEARNING_RATE = 0.002
ROUNDING = {"loss": 1e-5, "grad_norm": 1e-4, "weights": 1e-5}
"""Largest difference that another order of sums may cause: in nats, as a share of the
gradient's norm, and in the mean of a weight (AdamW moves a weight whose gradient is
nearly zero by the learning rate, in a direction that rounding decides).
"""
ALONE = "one process"


def rows() -> Iterator[Row]:
    """Measure; ours is how many steps of a product equal those of a single process, the
    peer all steps.
    """
    for ranks, products in PRODUCTS.items():
        for name, differences in differences_of(ranks, products).items():
            equal = sum(
                all(difference <= ROUNDING[key] for key, difference in step.items())
                for step in differences
            )
            yield row(f"forms_equal, {name}", equal, len(differences), "steps")


def differences_of(
    ranks: int, products: Sequence[dict[str, int]]
) -> dict[str, list[dict[str, float]]]:
    """Compare the steps of each product with those of a single process; the last step
    also has `weights`.

    Args:
        ranks: processes of each product.
        products: their forms.

    Raises:
        RuntimeError: a process failed; the message has its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "products.json", list(products))
        run_forking(
            "benchmarks.train.parallel_forms",
            folder,
            str(ranks),
            title=f"{ranks} processes, {list(products)}",
        )
        differences: dict[str, list[dict[str, float]]] = json.loads(
            (Path(folder) / "differences.json").read_text()
        )
    return differences


def label(product: dict[str, int]) -> str:
    """Return the name of a product, such as `replicate 2 x shard 4`."""
    return " x ".join(f"{name} {size}" for name, size in product.items()) or ALONE


def main(folder: Path, ranks: int) -> None:
    """Train alone and in every product, and write their differences."""
    load_all()
    products = json.loads((folder / "products.json").read_text())
    random_packed_set(folder / "mix", VOCAB, BATCH * STEPS, LENGTH).close()
    fork_ranks(1, partial(_train_all, folder, [{}]))
    fork_ranks(ranks, partial(_train_all, folder, products))
    alone, differences = torch.load(folder / f"{ALONE}.pt"), {}
    for name in map(label, products):
        trained = torch.load(folder / f"{name}.pt")
        steps = [
            {
                "loss": abs(line["loss"] - alone_line["loss"]),
                "grad_norm": abs(line["grad_norm"] / alone_line["grad_norm"] - 1.0),
            }
            for line, alone_line in zip(trained["lines"], alone["lines"], strict=True)
        ]
        steps[-1]["weights"] = max(
            float((trained["weights"][key] - weight).abs().mean())
            for key, weight in alone["weights"].items()
        )
        differences[name] = steps
    write_json(folder / "differences.json", differences)


def _train_all(folder: Path, products: Sequence[dict[str, int]]) -> None:
    """Train every product in one rank."""
    with process_group() as joined:
        for product in products:
            _train(folder, product, joined.device)


def _train(folder: Path, product: dict[str, int], device: torch.device) -> None:
    world = make_world(Parallel.model_validate(product), device)
    work = folder / f"work of {label(product)}"
    work.mkdir(exist_ok=True)
    packed = PackedSet(folder / "mix")
    shape = shape_of(
        Model(
            layers=2,
            width=32,
            heads=4,
            kv_heads=2,
            ffn_width=48,
            qk_norm=True,
            document_mask=True,
            tied_embeddings=False,
        ),
        VOCAB,
        LENGTH,
    )
    model = sharded_model(shape, drawn(shape, 0), world, torch.float32)
    record, _ = train(
        Job(
            section=pretrain_section(STEPS, BATCH, 2, 1, LEARNING_RATE),
            learner=Learner(next_token(packed, shape, device), model),
            world=world,
            context=Context(
                work,
                training=TrainingEngine(checkpoint_every=STEPS + 1),
                emit=lambda event: None,
            ),
        )
    )
    weights = whole_tensors(model)
    if record is not None:
        lines = [
            {"loss": line["loss"], "grad_norm": line["grad_norm"]}
            for line in record.lines()
        ]
        torch.save(
            {"lines": lines, "weights": weights}, folder / f"{label(product)}.pt"
        )
    packed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
