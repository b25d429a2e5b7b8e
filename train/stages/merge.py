"""Stage `merge`: a weighted average of pre-training checkpoints.

Output: `model/` as of pre-training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from gristmill.core.files import is_local, read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.base import Recipe
from gristmill.train.checkpoint import (
    CHECKPOINTS,
    complete_steps,
    damaged_files,
    step_folder,
)
from gristmill.train.models.own_model import INNER
from gristmill.train.models.tensor_files import (
    WEIGHTS_FILE,
    Planned,
    TensorFile,
    write_tensors,
)
from gristmill.train.models.weights import SHAPE_FILE
from gristmill.train.safe_loading import SafePlanner, check_index
from gristmill.train.stages.stage_inputs import MODEL, Inputs
from gristmill.train.store_sync import fetch_tree


class MergeError(RuntimeError):
    """A checkpoint to merge is missing or damaged."""


@dataclass(frozen=True)
class MergeSettings:
    """Settings of the stage.

    Attributes:
        steps: of the checkpoints.
        shares: weight of each; they sum to 1.
        of: last step of the training.
    """

    steps: list[int]
    shares: list[float]
    of: int


class MergeSummary(TypedDict):
    """Summary of the stage."""

    parameters: int
    steps: list[int]
    shares: list[float]


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> MergeSummary:
    """Average the weights in float64, one tensor in memory at a time.

    Raises:
        MergeError: a checkpoint is missing, incomplete or damaged.
    """
    settings = TypeAdapter(MergeSettings).validate_python(config)
    trained = inputs["pretrain"] / MODEL
    last = TensorFile(trained / WEIGHTS_FILE)
    checkpoints = {
        step: _checkpoint(inputs["pretrain"], step, context)
        for step in settings.steps
        if step != settings.of
    }

    def mean(name: str) -> Tensor:
        total = torch.zeros(last.shape(name), dtype=torch.float64)
        for step, share in zip(settings.steps, settings.shares, strict=True):
            if step == settings.of:
                tensor = last.read(name)
            else:
                # whatever the number of processes that saved it
                reader = FileSystemReader(checkpoints[step])
                saved = reader.read_metadata().state_dict_metadata
                key = f"model.{name}"
                if key not in saved:
                    key = f"model.{INNER}{name}"
                tensors = {key: torch.empty(last.shape(name))}
                dcp.load(  # type: ignore[attr-defined]
                    tensors,
                    storage_reader=reader,
                    planner=SafePlanner(),
                    no_dist=True,
                )
                tensor = tensors[key]
            total += share * tensor.double()
        return total.float()

    write_tensors(
        out / MODEL / WEIGHTS_FILE,
        {
            name: Planned(torch.float32, last.shape(name), partial(mean, name))
            for name in last.names()
        },
    )
    write_json(out / MODEL / SHAPE_FILE, read_json(trained / SHAPE_FILE))
    return {
        "parameters": sum(math.prod(last.shape(name)) for name in last.names()),
        "steps": settings.steps,
        "shares": settings.shares,
    }


def _checkpoint(trained: Path, step: int, context: Context) -> Path:
    """Local folder of an intact checkpoint."""
    folder = trained.parent / "work" / CHECKPOINTS
    checkpoint = step_folder(folder, step)
    steps = complete_steps(folder)
    if step not in steps:
        available = ", ".join(map(str, steps)) or "none"
        raise MergeError(
            f"merge: the training keeps no complete checkpoint of step {step} (there "
            f"are: {available}); set engine.permanent_every to a divisor of it, and "
            "train again: gristmill stage pretrain MANIFEST --force"
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
    return checkpoint
