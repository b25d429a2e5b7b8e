"""`gristmill bench forms`: products of three and of four parallel forms learn what one process learns.

`python -m benchmarks.train.parallel_forms FOLDER RANKS EXPERTS` trains every form of so many processes after one
process alone; the processes are forked from one that has loaded everything, which takes a fraction of torchrun's time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.train.forked_ranks import fork_ranks, load_all, run_forking
from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.engine import Parallel
from gristmill.mixtures.model import Model, Moe
from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_writing import write_packed_set
from gristmill.train.loop.loop import Job, train
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.parallel.process_groups import make_world, process_group
from gristmill.train.parallel.sharding import sharded_model, whole_tensors

PRODUCTS: dict[int, list[dict[str, int]]] = {
    8: [
        {"replicate": 2, "shard": 2, "tensor": 2},
        {"pipeline": 2, "shard": 2, "tensor": 2},
        {"pipeline": 2, "replicate": 2, "shard": 2},
        {"pipeline": 2, "replicate": 2, "tensor": 2},
        {"shard": 2, "context": 2, "tensor": 2},
        {"pipeline": 2, "context": 2, "shard": 2},
    ],
    16: [{"pipeline": 2, "replicate": 2, "shard": 2, "tensor": 2}],
}
"""By the number of processes."""
DEALT: dict[int, list[dict[str, int]]] = {
    2: [{"shard": 2, "deal_experts": True}],
    4: [{"shard": 4, "deal_experts": True}],
    8: [{"replicate": 2, "shard": 2, "context": 2, "deal_experts": True}],
}
"""The same, of a mixture of experts."""
STEPS, LENGTH, VOCAB = 3, 16, 128
LEARNING_RATE = 0.002
ROUNDING = {"loss": 1e-5, "grad_norm": 1e-4, "weights": 1e-5}
"""What another order of sums may change: nats, a share of the gradient's norm, and a weight on the average (AdamW moves
a weight whose gradient is nearly nought by the learning rate, whatever sign rounding gives it)."""
ALONE = "one process"
Row = dict[str, Any]


def rows() -> Iterator[Row]:
    """Measure; per product `ours` is how many of its steps are those of one process, `peer` how many there are."""
    yield from _rows_of(PRODUCTS, 0)


def dealt_rows() -> Iterator[Row]:
    """The same of a mixture of experts, which lie with several processes."""
    yield from _rows_of(DEALT, 4)


def _rows_of(forms: dict[int, list[dict[str, int]]], experts: int) -> Iterator[Row]:
    for ranks, products in forms.items():
        for name, differences in differences_of(ranks, products, experts).items():
            equal = sum(all(difference <= ROUNDING[key] for key, difference in step.items()) for step in differences)
            yield {
                "name": f"forms_equal, {name}",
                "ours": equal,
                "peer": len(differences),
                "unit": "steps",
                "ratio": equal / len(differences),
            }


def differences_of(
    ranks: int, products: Sequence[dict[str, int]], experts: int = 0
) -> dict[str, list[dict[str, float]]]:
    """How far each product's steps are from those of one process, by the product's name; the last step has `weights`.

    Args:
        ranks: processes of each product.
        products: their forms.
        experts: of each layer; none in a dense model.

    Raises:
        RuntimeError: a process failed; what it printed is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "products.json", list(products))
        run_forking(
            "benchmarks.train.parallel_forms",
            folder,
            str(ranks),
            str(experts),
            called=f"{ranks} processes, {list(products)}",
        )
        found: dict[str, list[dict[str, float]]] = json.loads((Path(folder) / "differences.json").read_text())
    return found


def label(product: dict[str, int]) -> str:
    """What people read: pipeline 2 x shard 4."""
    dealt = ", experts dealt" if product.get("deal_experts") else ""
    return " x ".join(f"{name} {size}" for name, size in product.items() if name != "deal_experts") + dealt or ALONE


def main(folder: Path, ranks: int, experts: int) -> None:
    """Train alone and in every product, and write down how far they are apart."""
    load_all()
    products = json.loads((folder / "products.json").read_text())
    _write_rows(folder / "mix")
    fork_ranks(1, partial(_train_all, folder, [{}], experts))
    fork_ranks(ranks, partial(_train_all, folder, products, experts))
    alone, found = torch.load(folder / f"{ALONE}.pt"), {}
    for name in map(label, products):
        trained = torch.load(folder / f"{name}.pt")
        found[name] = [
            {
                "loss": abs(ours["loss"] - theirs["loss"]),
                "grad_norm": abs(ours["grad_norm"] / theirs["grad_norm"] - 1.0),
            }
            for ours, theirs in zip(trained["lines"], alone["lines"], strict=True)
        ]
        found[name][-1]["weights"] = max(
            float((trained["weights"][key] - weight).abs().mean()) for key, weight in alone["weights"].items()
        )
    write_json(folder / "differences.json", found)


def _train_all(folder: Path, products: Sequence[dict[str, int]], experts: int) -> None:
    """One process's part in every product."""
    with process_group() as joined:
        for product in products:
            _train(folder, product, experts, joined.device)


def _train(folder: Path, product: dict[str, int], experts: int, device: torch.device) -> None:
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
            moe=Moe(experts=experts) if experts else None,
        ),
        VOCAB,
        LENGTH,
    )
    # Batches of 11 rows divide among no number of processes.
    section = Pretrain.model_validate(
        {
            "steps": STEPS,
            "global_batch_size": 11,
            "micro_batch_size": 2,
            "log_every": 1,
            "schedule": {"kind": "constant", "warmup_steps": 0},
            "optimizer": {"learning_rate": LEARNING_RATE},
        }
    )
    model = sharded_model(shape, drawn(shape, 0), world, torch.float32)
    objective = NextToken(packed, 0, torch.full((VOCAB,), 4.0, device=device), shape)
    record, _ = train(
        Job(
            section=section,
            objective=objective,
            model=model,
            world=world,
            context=Context(work, checkpoint_every=STEPS + 1, emit=lambda event: None),
        )
    )
    weights = whole_tensors(model)
    if record is not None:
        lines = [{key: line[key] for key in ("loss", "grad_norm")} for line in record.lines()]
        torch.save({"lines": lines, "weights": weights}, folder / f"{label(product)}.pt")
    packed.close()


def _write_rows(folder: Path) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB, (11 * STEPS, LENGTH))
    write_packed_set(folder, ids, {"all": len(ids)}, {"vocab_size": VOCAB, "eos": 0, "pad": 1, "sha256": ""})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
