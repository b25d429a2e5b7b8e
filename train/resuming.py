"""Start of a training: from scratch, from its last checkpoint, or from a checkpoint of
another training.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from gristmill.core.files import as_path, is_local, read_json, write_json
from gristmill.train.checkpoint import (
    CHECKPOINTS,
    MARKER,
    PREFIX,
    Checkpoints,
    Marker,
    complete_steps,
    damaged_files,
    is_complete,
)
from gristmill.train.distributed.process_groups import World, agree
from gristmill.train.distributed.rendezvous import TIMEOUT, record_attempt
from gristmill.train.loop.bad_steps import look_at_device
from gristmill.train.loop.batch_plan import extend_digest
from gristmill.train.loop.callbacks import Callbacks
from gristmill.train.loop.loop_state import LoopState, Part
from gristmill.train.loop.metrics_log import Record
from gristmill.train.loop.spikes import empty_window
from gristmill.train.loop.stopping import AgreedStop
from gristmill.train.loop.throughput import Clock, Profiler
from gristmill.train.loop.training_job import Job
from gristmill.train.optim.optimizer import make_optimizers
from gristmill.train.store_sync import fetch_tree, followed

Found = TypeVar("Found")


class OtherRowsError(RuntimeError):
    """A checkpoint has read rows of a different set."""


class Attempt:
    """One attempt at a job: its state from the start, or a checkpoint, to the end or
    the next kill.
    """

    def __init__(self, job: Job) -> None:
        section = job.section
        context = job.context
        device = job.world.device
        learner = job.learner
        engine = job.context.training
        self.job = job
        self.callbacks = Callbacks(section.callbacks, job.world)
        # time blocked by checkpoints since the last logged step
        self.save_seconds = 0.0
        self.optimizers = make_optimizers(
            learner.model, section.optimizer, section.width_factor
        )
        parts: dict[str, Part] = {}
        if learner.average is not None:
            parts["average"] = learner.average
        parts |= learner.state
        self.progress = LoopState(
            empty_window(device, section.spikes.window),
            torch.zeros(
                1 + learner.objective.sums_length, dtype=torch.float64, device=device
            ),
            learner.objective.fingerprint,
            parts,
        )
        self.checkpoints = Checkpoints(
            context.work / CHECKPOINTS,
            learner.model,
            self.optimizers,
            job.world,
            engine,
            context.warn,
            context.mirroring,
        )
        self._resume()
        if job.world.is_first and TIMEOUT in os.environ:
            record_attempt(
                context, followed(context.work.parent) / "work", self.progress.step
            )
        self.record = (
            Record(context.work, self.progress.step, engine)
            if job.world.is_first
            else None
        )
        self.profiler = Profiler(engine.profile, context, job.world, self.progress.step)
        self.clock = Clock(self.progress.tokens, self.progress.step)
        self.stop = AgreedStop(lag=1 if device.type == "cuda" else 0)

    def save(self) -> None:
        """Start writing a checkpoint of the current step; the time that this blocks is
        measured.
        """
        started = time.perf_counter()
        state = self.progress.plain(self.job.learner.objective.fingerprint)
        state["began_with"] = dict(self.job.context.lineage.start_models)
        state["callbacks"] = self.callbacks.state()
        self.checkpoints.save(self.progress.step, self.progress.tensors(), state)
        self.save_seconds += time.perf_counter() - started

    def look(self) -> None:
        """Read the flags of recent steps from the device."""
        look_at_device(self.progress, self.job, self.record)

    def _resume(self) -> None:
        job = self.job
        try:
            checkpoint = self.checkpoints.load_newest(self.progress.tensors())
        except (RuntimeError, ValueError, KeyError) as error:
            if job.section.continue_from is None:
                raise
            raise ContinueError(
                f"{job.context.stage}.continue_from: {job.section.continue_from} holds "
                "other tensors than this training's (another model, adapters, kind of "
                "optimizer or average); take a checkpoint of a training with the same "
                f"ones: {str(error).strip().splitlines()[-1]}"
            ) from error
        if checkpoint is None:
            return
        step, state = checkpoint
        saved_rows = state["rows_of"]
        rows = job.learner.objective.fingerprint
        if saved_rows != rows:
            raise OtherRowsError(
                f"{self.checkpoints.folder}: the checkpoint there has read rows of "
                f"{saved_rows}, but the rows now are of {rows}: resuming would skip "
                "some and repeat others; give back the data that it began with, or "
                "delete the folder and train again"
            )
        self.progress.restore(step, state)
        self.callbacks.load(state.get("callbacks", {}))


class ContinueError(RuntimeError):
    """A training cannot continue from the checkpoint in its settings."""


def take_over(job: Job) -> None:
    """Copy the checkpoint that a training continues from into its folder, unless that
    holds a checkpoint already; a collective.

    Raises:
        ContinueError: the checkpoint is damaged, or has read other tokens than the
            first steps of this training.
    """
    folder = job.context.work / CHECKPOINTS
    if agree(bool(complete_steps(folder)), job.world):
        return
    source = as_path(job.section.continue_from or "")
    marker = _checked(source, job)
    if job.context.mirroring.is_first_here(job.world.is_first):
        target = folder / source.name
        shutil.rmtree(target, ignore_errors=True)
        if is_local(source):
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(MARKER))
        else:
            fetch_tree(source, target)
        write_json(target / MARKER, marker)
    agree(marker["step"], job.world)


def _checked(source: Path, job: Job) -> Marker:
    """Check that a checkpoint's training has read this one's rows; returns its
    marker.
    """

    def refused(reason: str) -> ContinueError:
        return ContinueError(f"{job.context.stage}.continue_from: {source}{reason}")

    if not is_complete(source):
        raise refused(
            f" is not a complete checkpoint (a folder {PREFIX}... with {MARKER} in it)"
        )
    damaged = damaged_files(source)
    if damaged:
        raise refused(
            f": {', '.join(damaged)} is not what was saved; take another checkpoint"
        )
    objective = job.learner.objective
    marker: Marker = read_json(source / MARKER)
    step = marker["step"]
    state = marker["state"]
    fingerprint = objective.fingerprint
    if step >= job.section.steps:
        raise refused(
            f" has done {step} steps already, and this training has "
            f"{job.section.steps}; raise {job.context.stage}.steps, or take an earlier "
            "checkpoint"
        )
    if state["rows_of"] != fingerprint:
        raise refused(
            f" has read rows of the set {state['rows_of']}, but the "
            f"rows now are of {fingerprint}: only a set that differs in withheld rows "
            "is read on (mix.exclude)"
        )
    began_with = state.get("began_with", {})
    changed_stages = [
        stage
        for stage, fingerprint_now in job.context.lineage.start_models.items()
        if began_with.get(stage, fingerprint_now) != fingerprint_now
    ]
    if changed_stages:
        raise refused(
            " is of a training that began with another output of "
            f"{', '.join(changed_stages)} than "
            "this one; take a checkpoint of one that began with the same"
        )
    digest = fingerprint
    for number in range(step):
        digest = extend_digest(digest, job.plan.rows(objective.order, number))
    if digest != state["digest"]:
        raise refused(
            f" has read other rows in its {step} steps than this "
            "training would: another seed or batch size, or it has read a row that is "
            "withheld now; take an earlier checkpoint (gristmill takedown names the "
            "last clean one)"
        )
    return marker


def measured_once(file: Path, world: World, measure: Callable[[], Found]) -> Found:
    """Content of a file, equal on every rank; if the file is missing, `measure` is
    called on every rank to create it.

    Args:
        file: JSON, in the training's working folder.
        world: the processes.
        measure: returns a value that survives JSON; if it raises, the file is not
            written.
    """
    if not agree(file.exists(), world):
        measurement = measure()
        if world.is_first:
            write_json(file, measurement)
    return agree(read_json(file) if world.is_first else None, world)
