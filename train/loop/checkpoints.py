"""Saving and finding the state of a training: valid only with a marker that is written last.

    checkpoints/step-00000100/    what torch.distributed.checkpoint writes; loads at any world size
        complete.json             the step, the loop's plain state, and a digest of all other files' names and sizes

A checkpoint without its marker, or whose files are not those that the marker names, is torn: it is ignored, and
removed when the training resumes. The marker is removed first when an old checkpoint is deleted.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gristmill.dataprep.files import canonical_json, read_json, write_json
from gristmill.train.parallel.world import World, agree

MARKER = "complete.json"
PREFIX = "step-"


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"{PREFIX}{step:08d}"


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tensors: dict[str, Tensor],
    state: dict[str, Any], keep: int, world: World,
) -> None:
    """Write a checkpoint, then delete all but the newest `keep`. Every rank calls this together.

    Args:
        folder: holds all checkpoints.
        step: optimizer steps done.
        model, optimizers: sharded; each rank writes its part.
        tensors: further tensors, the same on every rank.
        state: further JSON, the same on every rank.
        keep: how many complete checkpoints stay.
        world: the processes.
    """
    import torch.distributed.checkpoint as dcp

    target = step_folder(folder, step)
    if world.is_first:
        remove_checkpoint(target)
        target.mkdir(parents=True)
    _wait_for_all(world)
    dcp.save({**_sharded_state(model, optimizers), "loop": tensors}, checkpoint_id=target)  # type: ignore[attr-defined]
    _wait_for_all(world)
    if world.is_first:
        write_json(target / MARKER, {"step": step, "files": digest_of_files(target), "state": state})
        for old in complete_steps(folder)[:-keep]:
            remove_checkpoint(step_folder(folder, old))


def load_newest(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tensors: dict[str, Tensor],
    world: World,
) -> tuple[int, dict[str, Any]] | None:
    """Continue from the newest complete checkpoint, and remove torn ones. Every rank calls this together.

    Args:
        folder: holds all checkpoints; may not exist.
        model, optimizers: filled in place, at whatever world size.
        tensors: filled in place.
        world: the processes.

    Returns:
        steps done and the loop's plain state, or None where there is no complete checkpoint.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    found = None
    if world.is_first:
        _remove_torn(folder)
        steps = complete_steps(folder)
        found = read_json(step_folder(folder, steps[-1]) / MARKER) if steps else None
    found = agree(found, world)
    if found is None:
        return None
    sharded = _sharded_state(model, optimizers)
    dcp.load({**sharded, "loop": tensors}, checkpoint_id=step_folder(folder, found["step"]))  # type: ignore[attr-defined]
    set_state_dict(model, optimizers, model_state_dict=sharded["model"], optim_state_dict=sharded["optimizer"],
                   options=StateDictOptions(strict=True))
    return found["step"], found["state"]


def complete_steps(folder: Path) -> list[int]:
    """Steps of which there is a complete checkpoint, ascending."""
    return sorted(int(path.name.removeprefix(PREFIX)) for path in _all_checkpoints(folder) if is_complete(path))


def is_complete(checkpoint: Path) -> bool:
    """Whether the marker is there and names exactly the files that are."""
    marker = checkpoint / MARKER
    if not marker.exists():
        return False
    try:
        return bool(read_json(marker)["files"] == digest_of_files(checkpoint))
    except (ValueError, KeyError):
        return False


def digest_of_files(checkpoint: Path) -> str:
    """A hash of the names and sizes of a checkpoint's files, the marker left out."""
    listing = sorted((path.name, path.stat().st_size) for path in checkpoint.iterdir() if path.name != MARKER)
    return hashlib.sha256(canonical_json(listing)).hexdigest()


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, its marker first, so that an interrupted removal leaves none that looks complete."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _remove_torn(folder: Path) -> None:
    for checkpoint in _all_checkpoints(folder):
        if not is_complete(checkpoint):
            remove_checkpoint(checkpoint)


def _all_checkpoints(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX}*"))


def _sharded_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizers)
    return {"model": weights, "optimizer": moments}


def _wait_for_all(world: World) -> None:
    if world.size > 1:
        dist.barrier()
