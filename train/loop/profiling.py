"""A trace of some steps, where the manifest asks for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gristmill.dataprep.context import Context
from gristmill.mixtures.engine import Profile
from gristmill.train.parallel.world import World

MOST_ALLOCATIONS = 1_000_000
"""Allocations and releases that a snapshot of memory remembers."""


class Profiler:
    """Starts and stops PyTorch's profiler at the steps that a section names; does nothing without one.

    Args:
        section: which steps.
        context: where the trace goes.
        world: the processes; each writes its own trace.
        step: done so far; a training that resumes behind the steps traces nothing.
    """

    def __init__(self, section: Profile | None, context: Context, world: World, step: int) -> None:
        self._section, self._context, self._world = section, context, world
        self._profile: Any = None
        self.after(step)

    def after(self, step: int) -> None:
        """Start or stop after a step, if that is the one."""
        if self._section is None:
            return
        if self._profile is not None and step >= self._section.first_step + self._section.steps - 1:
            self.close()
        if step == self._section.first_step - 1:
            self._start(self._section)

    def close(self) -> None:
        """Write what was traced so far."""
        if self._profile is None or self._section is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        folder = self._context.work / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"rank-{self._world.rank}.json.gz"))
        if self._section.memory and self._world.device.type == "cuda":
            self._dump_memory(folder)

    def _start(self, section: Profile) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            if section.memory:
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        elif section.memory:
            self._context.warn("engine.profile.memory: there is no GPU whose allocations could be recorded")
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profile.start()

    def _dump_memory(self, folder: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(folder / f"rank-{self._world.rank}-memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
