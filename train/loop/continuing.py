"""Continuing from another training's checkpoint: only where this one would have read the same rows up to it."""

from __future__ import annotations

import shutil
from pathlib import Path

from gristmill.dataprep.files import as_path, is_local, read_json
from gristmill.train.loop.checkpoints import CHECKPOINTS, MARKER, PREFIX, complete_steps, damaged_files, is_complete
from gristmill.train.loop.job import Job
from gristmill.train.loop.mirror import fetch_tree
from gristmill.train.loop.stream import extend_digest
from gristmill.train.parallel.world import agree

BEGAN_WITH = "began_with"
"""Under this name a checkpoint says which models its training began with: stage -> fingerprint."""


class ContinueError(RuntimeError):
    """A training cannot continue from the checkpoint that it was told to."""


def take_over(checkpoint: str, job: Job) -> None:
    """Put another training's checkpoint among this one's own, unless this one has come further already.

    Every rank calls this together.

    Args:
        checkpoint: folder of the other training's checkpoint.
        job: this training.

    Raises:
        ContinueError: it is damaged, or has read other tokens than this training's first steps would.
    """
    folder = job.context.work / CHECKPOINTS
    if agree(bool(complete_steps(folder)), job.world):
        return
    source = as_path(checkpoint)
    step = _checked_step(source, job)
    if job.world.is_first:
        target = folder / source.name
        shutil.rmtree(target, ignore_errors=True)
        if is_local(source):
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(MARKER))
            shutil.copy2(source / MARKER, target / MARKER)
        else:
            fetch_tree(source, target)
    agree(step, job.world)


def not_loaded(error: Exception, job: Job) -> Exception:
    """What to raise where a checkpoint could not be loaded: of another training's, that its tensors are others."""
    if job.section.continue_from is None or not isinstance(error, RuntimeError | ValueError | KeyError):
        return error
    return ContinueError(f"{job.context.stage}.continue_from: {job.section.continue_from} holds other tensors than "
                         "this training's (another model, adapters, kind of optimizer or average); take a checkpoint "
                         f"of a training with the same ones: {str(error).strip().splitlines()[-1]}")


def _checked_step(source: Path, job: Job) -> int:
    """The step of a checkpoint, once it is sure that its training has read what this one would have."""
    key = f"{job.context.stage}.continue_from"
    if not source.name.startswith(PREFIX) or not is_complete(source):
        raise ContinueError(f"{key}: {source} is no complete checkpoint (a folder {PREFIX}... with {MARKER} in it)")
    damaged = damaged_files(source)
    if damaged:
        raise ContinueError(f"{key}: {source}: {', '.join(damaged)} is not what was saved; take another checkpoint")
    marker, fingerprint = read_json(source / MARKER), job.objective.fingerprint
    step, state = int(marker["step"]), marker["state"]
    if step >= job.section.steps:
        raise ContinueError(f"{key}: {source} has done {step} steps already, of {job.section.steps} that this training "
                            f"is to have; raise {job.context.stage}.steps, or take an earlier checkpoint")
    if state["rows_of"] != fingerprint:
        raise ContinueError(f"{key}: {source} has read rows of the set {state['rows_of']}, but the rows now are of "
                            f"{fingerprint}: only a set that differs in withheld rows is read on (mix.exclude)")
    began_with = state.get(BEGAN_WITH, {})
    others = [stage for stage, now in job.context.began_with.items() if began_with.get(stage, now) != now]
    if others:
        raise ContinueError(f"{key}: the training of {source} began with another output of {', '.join(others)} than "
                            "this one; take a checkpoint of one that began with the same")
    digest = fingerprint
    for number in range(step):
        digest = extend_digest(digest, job.plan.rows(job.objective.order, number))
    if digest != state["digest"]:
        raise ContinueError(f"{key}: {source} has read other rows in its {step} steps than this training would: "
                            "another seed or batch size, or it has read a row that is withheld now; take an earlier "
                            "checkpoint (gristmill takedown names the last clean one)")
    return step
