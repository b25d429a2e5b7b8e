"""Stage `merge`: a weighted average of pre-training checkpoints, measured beside each
of them.

Output: `model/` as of pre-training; `merged.json`: share and held-out metrics of each
checkpoint, of the merged model and of the last checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from pydantic import TypeAdapter
from torch import Tensor

from gristmill.core.files import is_local, read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.evaluation import Evaluate
from gristmill.tokenize.packed import PackedSet
from gristmill.train.checkpoint import (
    CHECKPOINTS,
    complete_steps,
    damaged_files,
    is_complete,
    step_folder,
)
from gristmill.train.distributed.process_groups import make_deterministic
from gristmill.train.models.own_model import INNER
from gristmill.train.models.tensor_files import (
    WEIGHTS_FILE,
    Planned,
    TensorFile,
    ready,
    write_tensors,
)
from gristmill.train.models.weights import SHAPE_FILE, load_model
from gristmill.train.safe_loading import SafePlanner, check_index
from gristmill.train.stages.evaluate import (
    Sources,
    measure_sources,
)
from gristmill.train.stages.stage_inputs import MODEL, Inputs, open_rows
from gristmill.train.store_sync import fetch_tree


class MergeError(RuntimeError):
    """A checkpoint to merge is missing."""


@dataclass(frozen=True)
class MergeSettings:
    """Settings of the stage.

    Attributes:
        steps: of the checkpoints.
        shares: weight of each; they sum to 1.
        of: last step of the training.
        seed, bootstrap_samples: of the intervals of metrics.
    """

    steps: list[int]
    shares: list[float]
    of: int
    seed: int
    bootstrap_samples: int


class MergeSummary(TypedDict):
    """Summary of the stage; `sources` are metrics of the merged model."""

    parameters: int
    steps: list[int]
    shares: list[float]
    sources: Sources


class MeasuredModel(TypedDict):
    """Model of `merged.json`, with its share of the merged one."""

    model: str
    share: float | None
    sources: Sources


def run(
    inputs: Inputs,
    config: Mapping[str, object],
    out: Path,
    context: Context,
) -> MergeSummary:
    """Merge and measure; one plain process.

    Raises:
        MergeError: a checkpoint is missing, incomplete or damaged, or of another model.
    """
    make_deterministic(1)
    settings = TypeAdapter(MergeSettings).validate_python(config)
    steps = settings.steps
    shares = settings.shares
    trained = inputs["pretrain"]
    with open_rows(inputs["mix"], context) as packed:
        section = Evaluate(
            seed=settings.seed, bootstrap_samples=settings.bootstrap_samples
        )
        tokenizer = inputs["tokenizer"]
        singles = []
        measurements: list[MeasuredModel] = []
        for step, share in zip(steps, shares, strict=True):
            singles.append(_single(trained, step, settings.of, context))
            measurements.append(
                {
                    "model": f"step {step}",
                    "share": share,
                    "sources": _measured(singles[-1], packed, tokenizer, section),
                }
            )
            context.progress(len(singles), len(steps) + 2, "models")
        model = out / MODEL
        files = [TensorFile(model / WEIGHTS_FILE) for model in singles]

        def mean(name: str) -> Tensor:
            return sum(
                (
                    share * file.read(name).double()
                    for file, share in zip(files, shares, strict=True)
                ),
                torch.zeros((), dtype=torch.float64),
            ).float()

        write_tensors(
            model / WEIGHTS_FILE,
            {
                name: Planned(torch.float32, files[0].shape(name), partial(mean, name))
                for name in files[0].names()
            },
        )
        write_json(model / SHAPE_FILE, read_json(singles[0] / SHAPE_FILE))
        merged = _measured(out / MODEL, packed, tokenizer, section)
        last = _measured(trained / MODEL, packed, tokenizer, section)
    measurements += [
        {"model": "merged", "share": None, "sources": merged},
        {"model": f"step {settings.of}, the last", "share": None, "sources": last},
    ]
    write_json(out / "merged.json", {"models": measurements})
    file = TensorFile(out / MODEL / WEIGHTS_FILE)
    return {
        "parameters": sum(math.prod(file.shape(name)) for name in file.names()),
        "steps": steps,
        "shares": shares,
        "sources": merged,
    }


def _single(trained: Path, step: int, last: int, context: Context) -> Path:
    """Folder with the model of a checkpoint, independent of the number of processes;
    for the last step, the final model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if step == last:
        return trained / MODEL
    folder = trained.parent / "work" / CHECKPOINTS
    checkpoint = step_folder(folder, step)
    if not is_complete(checkpoint):
        available = ", ".join(map(str, complete_steps(folder))) or "none"
        raise MergeError(
            f"merge: the training keeps no complete checkpoint of step {step} (there "
            f"are: {available}); set engine.permanent_every to merge.every, or a "
            "divisor of it, and train again: gristmill stage pretrain MANIFEST --force"
        )
    if not is_local(checkpoint):
        local_copy = step_folder(context.work / CHECKPOINTS, step)
        fetch_tree(checkpoint, local_copy)
        checkpoint = local_copy
    if damaged := damaged_files(checkpoint):
        raise MergeError(
            f"merge: {checkpoint}: {', '.join(damaged)} is not what was saved; merge "
            "others, or train again: gristmill stage pretrain MANIFEST --force"
        )
    check_index(checkpoint)
    single = context.work / f"step-{step}"
    file = TensorFile(trained / MODEL / WEIGHTS_FILE)
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    prefix = INNER if any(key.startswith(f"model.{INNER}") for key in saved) else ""
    tensors = {
        f"model.{prefix}{name}": torch.empty(file.shape(name)) for name in file.names()
    }
    if mismatched := [
        key
        for key, tensor in tensors.items()
        if getattr(saved.get(key), "size", None) != tensor.shape
    ]:
        raise MergeError(
            f"merge: {checkpoint} is of another model: it has no {mismatched[0]} of "
            "this one's shape"
        )
    dcp.load(tensors, checkpoint_id=checkpoint, planner=SafePlanner(), no_dist=True)  # type: ignore[attr-defined]
    write_tensors(
        single / WEIGHTS_FILE,
        {name: ready(tensors[f"model.{prefix}{name}"]) for name in file.names()},
    )
    write_json(single / SHAPE_FILE, read_json(trained / MODEL / SHAPE_FILE))
    return single


def _measured(
    folder: Path, packed: PackedSet, tokenizer: Path, section: Evaluate
) -> Sources:
    """Metrics of the stage `evaluate` on held-out rows, by source."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder, device, runs_own_code=True, kind=None)
    return measure_sources(model, packed, tokenizer, section)
