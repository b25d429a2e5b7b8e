"""One attempt at a training, which lives until it is killed or done, and how it begins from a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from gristmill.train.loop.checkpoints import CHECKPOINTS, Checkpoints, Keeping
from gristmill.train.loop.continuing import BEGAN_WITH, not_loaded
from gristmill.train.loop.examination import look_at_device
from gristmill.train.loop.job import Job
from gristmill.train.loop.log import Clock
from gristmill.train.loop.profiling import Profiler
from gristmill.train.loop.progress import Part, Progress
from gristmill.train.loop.record import Record
from gristmill.train.loop.rollback import is_given_up, plan_after, read_rollbacks
from gristmill.train.loop.spikes import empty_window
from gristmill.train.loop.stream import Plan
from gristmill.train.optim.loss_scale import LossScale
from gristmill.train.optim.noise_scale import NoiseScale
from gristmill.train.optim.optimizer import make_optimizers
from gristmill.train.parallel.world import agree


class OtherRowsError(RuntimeError):
    """A checkpoint was made with other rows than there are now."""


class Attempt:
    """One attempt at a job: what lives from its start, or from a checkpoint, to its end or the next kill."""

    def __init__(self, job: Job) -> None:
        section, context, device = job.section, job.context, job.world.device
        self.job = job
        self.save_seconds = 0.0  # how long checkpoints held the training up since the last logged step
        self.optimizers = make_optimizers(job.model, section.optimizer, context.compute.offload_optimizer)
        self.loss_scale = LossScale(device) if section.precision == "fp16" else None
        self.noise_scale = None if section.noise_scale_every is None else NoiseScale(device)
        parts: dict[str, Part | None] = {
            "loss_scale": self.loss_scale, "noise_scale": self.noise_scale, "average": job.average,
            **job.state}
        self.progress = Progress(
            empty_window(device, section.spikes.window),
            torch.zeros(1 + job.objective.sums_length, dtype=torch.float64, device=device),
            job.objective.fingerprint, {name: part for name, part in parts.items() if part is not None})
        goes_back = section.spikes.rollback_after is not None
        keeping = Keeping(context.keep_checkpoints, context.permanent_every,
                          section.spikes.rollback_steps if goes_back else None)
        self.checkpoints = Checkpoints(context.work / CHECKPOINTS, job.model, self.optimizers, job.world, keeping,
                                       context.warn, context.saved)
        self.rollbacks: list[dict[str, Any]] = agree(read_rollbacks(context.work), job.world)
        self.progress.rollbacks = len(self.rollbacks)
        self._resume()
        if goes_back and self.progress.step == 0:
            self.save()
        self.record = Record(context.work, self.progress.step, len(self.rollbacks),
                             context.wandb) if job.world.is_first else None
        self.profiler = Profiler(context.profile, context, job.world, self.progress.step)
        self.clock = Clock()

    @property
    def plan(self) -> Plan:
        """Which positions each step reads, after all rollbacks."""
        return plan_after(self.job.plan, self.rollbacks)

    def save(self) -> None:
        """Begin to write a checkpoint of the step that is done; how long the training waits for that is counted."""
        started = time.perf_counter()
        self.checkpoints.save(self.progress.step, self.progress.tensors(),
                              self.progress.plain(self.job.objective.fingerprint)
                              | {BEGAN_WITH: dict(self.job.context.began_with)})
        self.save_seconds += time.perf_counter() - started

    def look(self) -> None:
        """Ask the device which steps were bad."""
        look_at_device(self.progress, self.job.objective, self.plan, self.job.section.spikes.rollback_after,
                       self.job.decode, self.job.known, self.job.world, self.job.context, self.record)

    def _resume(self) -> None:
        try:
            found = self.checkpoints.load_newest(
                self.progress.tensors(), lambda step, state: is_given_up(step, state, self.rollbacks))
        except Exception as error:
            raise not_loaded(error, self.job) from error
        if found is not None:
            check_rows(found[1].get("rows_of"), self.job.objective.fingerprint, self.checkpoints.folder)
            self.progress.restore(*found)
            self.progress.rollbacks = len(self.rollbacks)


def check_rows(saved: str | None, now: str, folder: Path) -> None:
    """Refuse to go on with other rows than those that a checkpoint has read.

    Raises:
        OtherRowsError: names both sets of rows.
    """
    if saved != now:
        raise OtherRowsError(
            f"{folder}: the checkpoint there has read rows of {saved}, but the rows now are of {now}: going on would "
            "skip some and repeat others; give back the data that it began with, or delete the folder and train anew")
