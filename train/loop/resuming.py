"""How a training begins: from nothing, from its own last checkpoint, or from another training's."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from gristmill.dataprep.files import as_path, is_local, read_json, write_json
from gristmill.mixtures.training import CallbackEvent
from gristmill.train.loop.bad_steps import look_at_device
from gristmill.train.loop.callbacks import EVENTS, Callbacks
from gristmill.train.loop.checkpoints import (
    CHECKPOINTS,
    MARKER,
    PREFIX,
    Checkpoints,
    Keeping,
    complete_steps,
    damaged_files,
    is_complete,
)
from gristmill.train.loop.job import Job
from gristmill.train.loop.mirror import fetch_tree
from gristmill.train.loop.record import Record, append_line, cut_after, read_lines
from gristmill.train.loop.rollback import is_given_up, plan_after, read_rollbacks
from gristmill.train.loop.row_plan import RowOrder, RowPlan, extend_digest
from gristmill.train.loop.spikes import empty_window
from gristmill.train.loop.state import LoopState, Part
from gristmill.train.loop.throughput import Clock, Profiler
from gristmill.train.optim.loss_scale import LossScale
from gristmill.train.optim.noise_scale import NoiseScale
from gristmill.train.optim.optimizer import make_optimizers
from gristmill.train.parallel.world import World, agree

BEGAN_WITH = "began_with"
"""Under this name a checkpoint says which models its training began with: stage -> fingerprint."""
CALLBACKS = "callbacks"
"""Under this name it has what callbacks keep."""
SCALES = "learning_rate_scales.jsonl"
"""Of the working files: what callbacks have made of the learning rate."""
Found = TypeVar("Found")


class OtherRowsError(RuntimeError):
    """A checkpoint was made with other rows than there are now."""


class Attempt:
    """One attempt at a job: what lives from its start, or from a checkpoint, to its end or the next kill."""

    def __init__(self, job: Job) -> None:
        section, context, device = job.section, job.context, job.world.device
        self.job = job
        self.callbacks = Callbacks(section.callbacks, job.world)
        self.save_seconds = 0.0  # how long checkpoints held the training up since the last logged step
        self.optimizers = make_optimizers(
            job.model, section.optimizer, context.compute.offload_optimizer, section.steps, section.width_factor
        )
        self.loss_scale = LossScale(device) if section.precision == "fp16" else None
        self.noise_scale = None if section.noise_scale_every is None else NoiseScale(device)
        parts: dict[str, Part | None] = {
            "loss_scale": self.loss_scale,
            "noise_scale": self.noise_scale,
            "average": job.average,
            **job.state,
        }
        self.progress = LoopState(
            empty_window(device, section.spikes.window),
            torch.zeros(1 + job.objective.sums_length, dtype=torch.float64, device=device),
            job.objective.fingerprint,
            {name: part for name, part in parts.items() if part is not None},
        )
        goes_back = section.spikes.rollback_after is not None
        keeping = Keeping(
            context.keep_checkpoints, context.permanent_every, section.spikes.rollback_steps if goes_back else None
        )
        self.checkpoints = Checkpoints(
            context.work / CHECKPOINTS,
            job.model,
            self.optimizers,
            job.world,
            keeping,
            context.warn,
            context.following,
            context.apart,
        )
        self.rollbacks: list[dict[str, Any]] = agree(read_rollbacks(context.work), job.world)
        self.progress.rollbacks = len(self.rollbacks)
        if job.world.is_first and (context.work / SCALES).exists():
            cut_after(context.work / SCALES, section.steps)  # a kill may have torn its last line
        self._scales: list[dict[str, Any]] = agree(read_lines(context.work / SCALES), job.world)
        self._resume()
        if goes_back and self.progress.step == 0:
            self.save()
        self.record = (
            Record(context.work, self.progress.step, len(self.rollbacks), context.trackers)
            if job.world.is_first
            else None
        )
        self.profiler = Profiler(context.profile, context, job.world, self.progress.step)
        self.clock = Clock(self.progress.tokens, self.progress.step)

    @property
    def plan(self) -> RowPlan:
        """Which positions each step reads, after all rollbacks."""
        return plan_after(self.job.plan, self.rollbacks)

    def save(self) -> None:
        """Begin to write a checkpoint of the step that is done; how long the training waits for that is counted."""
        started = time.perf_counter()
        self.checkpoints.save(
            self.progress.step,
            self.progress.tensors(),
            self.progress.plain(self.job.objective.fingerprint)
            | {BEGAN_WITH: dict(self.job.context.began_with), CALLBACKS: self.callbacks.state()},
        )
        self.save_seconds += time.perf_counter() - started

    def restore(self, step: int, plain: dict[str, Any]) -> None:
        """Go to a checkpoint's state; the tensors are there already."""
        self.progress.restore(step, plain)
        self.progress.rollbacks = len(self.rollbacks)
        self.callbacks.load(plain.get(CALLBACKS, {}))

    def replayed(self, event: CallbackEvent, scales: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """What callbacks make of the learning rate at an event: what an earlier attempt has written down of it, as far
        as that got, even if they would decide otherwise now; else what they say, which is written down.
        """
        now = (self.progress.step, EVENTS.index(event))
        if self._scales and now <= (self._scales[-1]["step"], EVENTS.index(self._scales[-1]["event"])):
            return [one for one in self._scales if (one["step"], EVENTS.index(one["event"])) == now]
        for one in scales:
            self._scales.append(one)
            if self.job.world.is_first:
                append_line(self.job.context.work / SCALES, one)
        return scales

    def forget_scales_after(self, step: int) -> None:
        """Where the training goes back: what follows is another training."""
        self._scales = [one for one in self._scales if one["step"] <= step]
        if self.job.world.is_first and (self.job.context.work / SCALES).exists():
            cut_after(self.job.context.work / SCALES, step)

    def look(self) -> None:
        """Ask the device which steps were bad."""
        look_at_device(
            self.progress,
            self.job.objective,
            self.plan,
            self.job.section.spikes.rollback_after,
            self.job.decode,
            self.job.known,
            self.job.world,
            self.job.context,
            self.record,
        )

    def _resume(self) -> None:
        try:
            found = self.checkpoints.load_newest(
                self.progress.tensors(), lambda step, state: is_given_up(step, state, self.rollbacks)
            )
        except Exception as error:
            raise not_loaded(error, self.job) from error
        if found is not None:
            check_rows(found[1].get("rows_of"), self.job.objective.fingerprint, self.checkpoints.folder)
            self.restore(*found)


def check_rows(saved: str | None, now: str, folder: Path) -> None:
    """Refuse to resume with other rows than those that a checkpoint has read.

    Raises:
        OtherRowsError: names both sets of rows.
    """
    if saved != now:
        raise OtherRowsError(
            f"{folder}: the checkpoint there has read rows of {saved}, but the rows now are of {now}: resuming would "
            "skip some and repeat others; give back the data that it began with, or delete the folder and train again"
        )


class ContinueError(RuntimeError):
    """A training cannot continue from the checkpoint that its settings name."""


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
    step, marker = _checked(source, job)
    if job.world.is_first or (job.context.apart and job.context.following is not None):
        target = folder / source.name
        shutil.rmtree(target, ignore_errors=True)
        if is_local(source):
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(MARKER))
        else:
            fetch_tree(source, target)
        write_json(target / MARKER, marker)
    agree(step, job.world)


def not_loaded(error: Exception, job: Job) -> Exception:
    """What to raise where a checkpoint could not be loaded: of another training's, that its tensors are others."""
    if job.section.continue_from is None or not isinstance(error, RuntimeError | ValueError | KeyError):
        return error
    return ContinueError(
        f"{job.context.stage}.continue_from: {job.section.continue_from} holds other tensors than "
        "this training's (another model, adapters, kind of optimizer or average); take a checkpoint "
        f"of a training with the same ones: {str(error).strip().splitlines()[-1]}"
    )


def _checked(source: Path, job: Job) -> tuple[int, dict[str, Any]]:
    """The step of a checkpoint, once it is sure that its training has read what this one would have, and what marks it
    as one of this training: of a set that this one's continues, the rows have other numbers here."""
    key = f"{job.context.stage}.continue_from"
    if not source.name.startswith(PREFIX) or not is_complete(source):
        raise ContinueError(f"{key}: {source} is not a complete checkpoint (a folder {PREFIX}... with {MARKER} in it)")
    damaged = damaged_files(source)
    if damaged:
        raise ContinueError(f"{key}: {source}: {', '.join(damaged)} is not what was saved; take another checkpoint")
    marker, fingerprint = read_json(source / MARKER), job.objective.fingerprint
    step, state = int(marker["step"]), marker["state"]
    if step >= job.section.steps:
        raise ContinueError(
            f"{key}: {source} has done {step} steps already, of {job.section.steps} that this training "
            f"is to have; raise {job.context.stage}.steps, or take an earlier checkpoint"
        )
    before = next((one for one in job.sets_before if one.fingerprint == state["rows_of"]), None)
    if before is None and state["rows_of"] != fingerprint:
        raise ContinueError(
            f"{key}: {source} has read rows of the set {state['rows_of']}, but the rows now are of "
            f"{fingerprint}: only a set that differs in withheld rows, or that continues that one, is "
            "read on (mix.exclude, mix.continues)"
        )
    began_with = state.get(BEGAN_WITH, {})
    others = [stage for stage, now in job.context.began_with.items() if began_with.get(stage, now) != now]
    if others:
        raise ContinueError(
            f"{key}: the training of {source} began with another output of {', '.join(others)} than "
            "this one; take a checkpoint of one that began with the same"
        )
    if before is not None and job.plan.end(step) > before.positions:
        raise ContinueError(
            f"{key}: {source} has read {job.plan.end(step)} rows, but the set continues the one that "
            f"it read behind {before.positions} rows (mix.continues); take an earlier checkpoint"
        )
    digest = _digest(fingerprint, job.objective.order, job, step)
    read = digest if before is None else _digest(before.fingerprint, before.order, job, step)
    if read != state["digest"]:
        raise ContinueError(
            f"{key}: {source} has read other rows in its {step} steps than this training would: "
            "another seed or batch size, or it has read a row that is withheld now; take an earlier "
            "checkpoint (gristmill takedown names the last clean one)"
        )
    return step, {**marker, "state": {**state, "rows_of": fingerprint, "digest": digest}}


def _digest(fingerprint: str, order: RowOrder, job: Job, steps: int) -> str:
    digest = fingerprint
    for number in range(steps):
        digest = extend_digest(digest, job.plan.rows(order, number))
    return digest


def measured_once(file: Path, world: World, measure: Callable[[], Found]) -> Found:
    """The content of a file, the same on every rank; `measure`, called on every rank, makes it where there is none.

    Args:
        file: of the training's working folder; JSON.
        world: the processes.
        measure: what it finds must survive JSON; what it raises leaves no file.
    """
    if not agree(file.exists(), world):
        found = measure()
        if world.is_first:
            write_json(file, found)
    told: Found = agree(read_json(file) if world.is_first else None, world)
    return told
