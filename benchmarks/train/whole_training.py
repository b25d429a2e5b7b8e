"""A side of `sizes.py`, in a process of its own: `python -m
benchmarks.train.whole_training SIDE FOLDER SIZE`.

The last line of its output has the measurements as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.train.sizes import WINDOWS, OurSpeed, Size, Speed
from benchmarks.train.small_models import hf_llama, next_token, pretrain_section
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import Compute, TrainingEngine
from gristmill.mixtures.schema.model import Model
from gristmill.tokenize.packed import PackedSet
from gristmill.train.distributed.fsdp import compute_dtype, sharded_model
from gristmill.train.distributed.process_groups import single_process
from gristmill.train.loop.prefetch import reading_threads
from gristmill.train.loop.throughput import (
    Utilisation,
    peak_flops,
    peak_memory_bytes,
)
from gristmill.train.loop.training_job import Job, Learner
from gristmill.train.models.model_config import (
    Shape,
    TransformersShape,
    shape_of,
)
from gristmill.train.models.weights import TensorOf, drawn, read_shape, stored
from gristmill.train.planning.flops import flops_per_token
from gristmill.train.trainer import train

LEARNING_RATE = 1e-4
MATMUL, GPU_MATMUL = 1024, 8192
"""Rows and columns of the plain matrix product; large enough on a GPU to hide launch
time.
"""


def ours(packed: PackedSet, size: Size) -> OurSpeed:
    """Run a pre-training as the stage does, with checkpoints and without validation."""
    shape, tensor_of = _start(size)
    window, steps = size.window_steps, WINDOWS * size.window_steps
    section = pretrain_section(steps, size.rows, size.micro_rows, window, LEARNING_RATE)
    compute, flops = (
        Compute(compile=size.compile),
        flops_per_token(shape, packed.sequence_length),
    )
    with single_process() as world, tempfile.TemporaryDirectory() as work:
        dtype = compute_dtype("auto", world.device)
        model = sharded_model(shape, tensor_of, world, dtype, compute)
        context = Context(
            Path(work),
            training=TrainingEngine(checkpoint_every=3 * window, compute=compute),
            emit=lambda event: None,
        )
        record, summary = train(
            Job(
                section=section,
                learner=Learner(next_token(packed, shape, world.device), model),
                world=world,
                context=context,
                utilisation=Utilisation(
                    peak_flops(world.device, dtype), flops.causal / flops.whole
                ),
                reading_threads=reading_threads(packed.local, world.device),
            )
        )
        assert record is not None  # a single process is the first
        timed = [
            line
            for line in record.lines()
            if line["step"] > window and "tokens_per_second" in line
        ]
        undisturbed = [line for line in timed if "checkpoint_seconds" not in line]
        best = max(undisturbed, key=lambda line: line["tokens_per_second"])
        return {
            "tokens_per_second": best["tokens_per_second"],
            "mfu": best["mfu"],
            "mfu_causal": best["mfu_causal"],
            "data_wait_share": best["data_wait_share"],
            "checkpoint_seconds": [
                line["checkpoint_seconds"]
                for line in timed
                if "checkpoint_seconds" in line
            ],
            "flops": best["tokens_per_second"] * flops.whole,
            "matmul": _matmul_rate(world.device, dtype),
            "peak_memory_bytes": summary["peak_memory_bytes"],
        }


def _start(size: Size) -> tuple[Shape | TransformersShape, TensorOf]:
    """Sizes and first weights of the model."""
    if isinstance(size.model, Path):
        return read_shape(size.model), stored(size.model)
    shape = shape_of(size.model, size.vocab, size.length)
    return shape, drawn(shape, 0)


def transformers(packed: PackedSet, size: Size) -> Speed:
    """Run a class of transformers, by default Llama, in a plain loop: the same tokens,
    batches, precision, clipping and fused AdamW.
    """
    from transformers import AutoModelForCausalLM

    with single_process() as world:
        device, length, window = (
            world.device,
            packed.sequence_length,
            size.window_steps,
        )
        if isinstance(size.model, Path):
            model = AutoModelForCausalLM.from_pretrained(
                size.model, dtype=torch.float32
            ).to(device)
        else:
            model = hf_llama(shape_of(size.model, size.vocab, size.length), length).to(
                device
            )
        run = model if size.compile == "off" else torch.compile(model)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True
        )
        order, dtype = (
            np.random.default_rng(0).permutation(packed.rows),
            compute_dtype("auto", device),
        )
        fastest = float("inf")
        for number in range(WINDOWS):
            started = time.perf_counter()
            for step in range(number * window, (number + 1) * window):
                batch = order[step * size.rows : (step + 1) * size.rows]
                for start in range(0, len(batch), size.micro_rows):
                    ids = torch.from_numpy(
                        packed.read(batch[start : start + size.micro_rows])
                    ).to(device)
                    with torch.autocast(
                        device.type, dtype, enabled=dtype != torch.float32
                    ):
                        loss = run(input_ids=ids, labels=ids).loss * (
                            len(ids) / len(batch)
                        )
                    loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            loss.item()  # waits for the device
            fastest = min(fastest, time.perf_counter() - started) if number else fastest
        return {
            "tokens_per_second": window * size.rows * length / fastest,
            "peak_memory_bytes": peak_memory_bytes(device, world),
        }


def main(side: str, folder: Path, size: Size) -> None:
    """Measure a side, and print the measurements."""
    packed = PackedSet(folder / "mix")
    print(json.dumps({"ours": ours, "transformers": transformers}[side](packed, size)))


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a plain matrix product, the best of some."""
    size = GPU_MATMUL if device.type == "cuda" else MATMUL
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


if __name__ == "__main__":
    settings = json.loads(sys.argv[3])
    given = settings.pop("model")
    model = Path(given) if isinstance(given, str) else Model.model_validate(given)
    main(sys.argv[1], Path(sys.argv[2]), Size(model=model, **settings))
