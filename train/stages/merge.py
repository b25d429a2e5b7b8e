"""Stage `merge`: an average of checkpoints of the pre-training, measured beside each of them.

Output: `model/` as of pre-training; `merged.json`: of each checkpoint, of the merged model and of the one at the end of
the training the share, and what was measured on held-out rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import is_local, read_json, write_json
from gristmill.mixtures.evaluation import Evaluate
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.checkpoints import (
    CHECKPOINTS,
    complete_steps,
    damaged_files,
    is_complete,
    step_folder,
)
from gristmill.train.loop.mirror import fetch_tree
from gristmill.train.loop.safe_loading import SafePlanner, check_index
from gristmill.train.models.own_model import INNER
from gristmill.train.models.tensor_files import WEIGHTS_FILE, Planned, TensorFile, ready, write_tensors
from gristmill.train.models.weights import SHAPE_FILE, load_model
from gristmill.train.parallel.world import make_deterministic
from gristmill.train.stages.evaluate import measure_filling, measure_sources
from gristmill.train.stages.stage_inputs import MODEL, open_rows


class MergeError(RuntimeError):
    """Checkpoints that are to be merged are not there."""


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Merge and measure; one plain process.

    Raises:
        MergeError: a checkpoint is gone, torn or damaged, or of another model.
    """
    make_deterministic(1)
    steps, shares, trained = config["steps"], config["shares"], inputs["pretrain"]
    with open_rows(inputs["mix"], context) as packed:
        measure = partial(
            _measured,
            packed=packed,
            tokenizer=inputs["tokenizer"],
            section=Evaluate(seed=config["seed"], bootstrap_samples=config["bootstrap_samples"]),
        )
        singles, found = [], []
        for step, share in zip(steps, shares, strict=True):
            singles.append(_single(trained, step, config["of"], context))
            found.append({"model": f"step {step}", "share": share, "sources": measure(singles[-1])})
            context.progress(len(singles), len(steps) + 2, "models")
        write_average(out / MODEL, singles, shares)
        merged, last = (measure(folder / MODEL) for folder in (out, trained))
    found += [
        {"model": "merged", "share": None, "sources": merged},
        {"model": f"step {config['of']}, the last", "share": None, "sources": last},
    ]
    write_json(out / "merged.json", {"models": found})
    file = TensorFile(out / MODEL / WEIGHTS_FILE)
    return {
        "parameters": sum(math.prod(file.shape(name)) for name in file.names()),
        "steps": steps,
        "shares": shares,
        "sources": merged,
    }


def write_average(out: Path, models: Sequence[Path], shares: Sequence[float]) -> None:
    """Write the weighted mean of models of one shape; sums are in float64, and memory holds one tensor of them.

    Args:
        out: folder of the new model.
        models: folders of models that a training stage saved.
        shares: of each; together 1.
    """
    files = [TensorFile(model / WEIGHTS_FILE) for model in models]

    def mean(name: str) -> Tensor:
        return sum(
            (share * file.read(name).double() for file, share in zip(files, shares, strict=True)),
            torch.zeros((), dtype=torch.float64),
        ).float()

    write_tensors(
        out / WEIGHTS_FILE,
        {name: Planned(torch.float32, files[0].shape(name), partial(mean, name)) for name in files[0].names()},
    )
    write_json(out / SHAPE_FILE, read_json(models[0] / SHAPE_FILE))


def _single(trained: Path, step: int, last: int, context: Context) -> Path:
    """A folder with the model of a checkpoint, however many processes have written that; of the last step, the one that
    the training ended with."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if step == last:
        return trained / MODEL
    checkpoint, single = _checkpoint(trained, step, context), context.work / f"step-{step}"
    file = TensorFile(trained / MODEL / WEIGHTS_FILE)
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    own = INNER if any(key.startswith(f"model.{INNER}") for key in saved) else ""
    found = {f"model.{own}{name}": torch.empty(file.shape(name)) for name in file.names()}
    if others := [key for key, tensor in found.items() if getattr(saved.get(key), "size", None) != tensor.shape]:
        raise MergeError(f"merge: {checkpoint} is of another model: it has no {others[0]} of this one's shape")
    dcp.load(found, checkpoint_id=checkpoint, planner=SafePlanner(), no_dist=True)  # type: ignore[attr-defined]
    write_tensors(single / WEIGHTS_FILE, {name: ready(found[f"model.{own}{name}"]) for name in file.names()})
    write_json(single / SHAPE_FILE, read_json(trained / MODEL / SHAPE_FILE))
    return single


def _checkpoint(trained: Path, step: int, context: Context) -> Path:
    """The sound checkpoint of a step, on this machine."""
    folder = trained.parent / "work" / CHECKPOINTS
    checkpoint = step_folder(folder, step)
    if not is_complete(checkpoint):
        there = ", ".join(map(str, complete_steps(folder))) or "none"
        raise MergeError(
            f"merge: the training keeps no complete checkpoint of step {step} (there are: {there}); set "
            "engine.permanent_every to merge.every, or a divisor of it, and train again: gristmill stage "
            "pretrain MANIFEST --force"
        )
    if not is_local(checkpoint):
        here = step_folder(context.work / CHECKPOINTS, step)
        fetch_tree(checkpoint, here)
        checkpoint = here
    if damaged := damaged_files(checkpoint):
        raise MergeError(
            f"merge: {checkpoint}: {', '.join(damaged)} is not what was saved; merge others, or train "
            "again: gristmill stage pretrain MANIFEST --force"
        )
    check_index(checkpoint)
    return checkpoint


def _measured(folder: Path, packed: PackedSet, tokenizer: Path, section: Evaluate) -> dict[str, Any]:
    """What the stage `evaluate` measures of a model on held-out rows, by source."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder, device, runs_own_code=True, kind=None)
    if model.shape.kind != "decoder":
        found: dict[str, Any] = measure_filling(model, packed, tokenizer, section)["sources"]
        return found
    return measure_sources(model, packed, tokenizer, section)
