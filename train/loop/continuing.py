"""Going on from another training's checkpoint: only where this one would have read the same rows up to it."""

from __future__ import annotations

import shutil
from pathlib import Path

from gristmill.dataprep.files import as_path, read_json
from gristmill.tokenize.order import Order
from gristmill.train.loop.checkpoints import MARKER, PREFIX, complete_steps, damaged_files, is_complete
from gristmill.train.loop.stream import Plan, extend_digest
from gristmill.train.parallel.world import World, agree


class ContinueError(RuntimeError):
    """A training cannot go on from the checkpoint that it was told to."""


def take_over(checkpoint: str, folder: Path, fingerprint: str, order: Order, plan: Plan, world: World) -> int | None:
    """Put another training's checkpoint among this one's own, unless this one has come further already.

    Every rank calls this together.

    Args:
        checkpoint: folder of the other training's checkpoint.
        folder: this training's checkpoints.
        fingerprint: of what the rows of this training hold.
        order: in which this training reads them.
        plan: which positions its steps take.
        world: the processes.

    Returns:
        the step that it is of, or None where this training has checkpoints of its own.

    Raises:
        ContinueError: it is damaged, or has read other tokens than this training's first steps would.
    """
    if agree(bool(complete_steps(folder)), world):
        return None
    source = as_path(checkpoint)
    step = _checked_step(source, fingerprint, order, plan)
    if world.is_first:
        target = folder / source.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(MARKER))
        shutil.copy2(source / MARKER, target / MARKER)
    agree(step, world)
    return step


def _checked_step(source: Path, fingerprint: str, order: Order, plan: Plan) -> int:
    """The step of a checkpoint, once it is sure that its training has read what this one would have."""
    if not source.name.startswith(PREFIX) or not is_complete(source):
        raise ContinueError(f"pretrain.continue_from: {source} is no complete checkpoint (a folder {PREFIX}... with "
                            f"{MARKER} in it)")
    damaged = damaged_files(source)
    if damaged:
        raise ContinueError(f"pretrain.continue_from: {source}: {', '.join(damaged)} is not what was saved; take "
                            "another checkpoint")
    marker = read_json(source / MARKER)
    step, state = int(marker["step"]), marker["state"]
    if state["rows_of"] != fingerprint:
        raise ContinueError(f"pretrain.continue_from: {source} has read rows of the set {state['rows_of']}, but the "
                            f"rows now are of {fingerprint}: only a set that differs in withheld rows goes on "
                            "(mix.exclude)")
    digest = fingerprint
    for number in range(step):
        digest = extend_digest(digest, plan.rows(order, number))
    if digest != state["digest"]:
        raise ContinueError(f"pretrain.continue_from: {source} has read other rows in its {step} steps than this "
                            "training would: another seed or batch size, or it has read a row that is withheld now; "
                            "take an earlier checkpoint (gristmill takedown names the last clean one)")
    return step
