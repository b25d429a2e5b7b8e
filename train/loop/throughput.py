"""How fast a training runs and what it holds: tokens per second, share of the peak, memory, sizes of updates, and a
trace of some steps where the manifest asks for one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gristmill.dataprep.context import Context
from gristmill.dataprep.processes import peak_resident_bytes
from gristmill.mixtures.engine import Profile
from gristmill.train.optim.dtensor_sums import squared_norm
from gristmill.train.parallel.pipeline_parallel import over_stages
from gristmill.train.parallel.world import World, max_over_ranks
from gristmill.train.planning.devices import find_device

MOST_ALLOCATIONS = 1_000_000
"""Allocations and releases that a snapshot of memory remembers."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's dense bfloat16 peak, or None where it is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    found = find_device(torch.cuda.get_device_name(device))
    return None if found is None else found.flops


def model_flops_utilisation(
    tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int
) -> float | Literal["unknown"]:
    """MFU (PaLM, appendix B): model arithmetic per second over the peak of all devices; never a guess."""
    if peak is None:
        return "unknown"
    return tokens_per_second * flops_per_token / (peak * devices)


class Clock:
    """Time, tokens and waiting since the last logged step of an attempt.

    Until then they count from the end of its first step, which compiles and waits for the first batch; only where that
    step is logged itself, it is measured.

    Args:
        tokens, step: read and done before the attempt.
    """

    def __init__(self, tokens: int, step: int) -> None:
        self.restart(tokens, step, 0.0)
        self._is_warm = False

    def restart(self, tokens: int, step: int, waited_seconds: float) -> None:
        """Start measuring; `waited_seconds`: for batches so far."""
        self.started, self.tokens, self.step, self.waited_seconds = time.perf_counter(), tokens, step, waited_seconds
        self._is_warm = True

    def skip_first_step(self, tokens: int, step: int, waited_seconds: float) -> None:
        """Start anew after the first step of an attempt; called after each step that is not logged."""
        if not self._is_warm:
            self.restart(tokens, step, waited_seconds)

    def rate(self, tokens: int) -> float:
        """Tokens per second since the start."""
        return (tokens - self.tokens) / (time.perf_counter() - self.started)

    def data_wait(self, step: int, waited_seconds: float, world: World) -> dict[str, float]:
        """How long a step waited for its batch on the slowest rank: seconds, and as a share of the step's time.

        A mean over the steps since the start; every rank calls this together.
        """
        waited = max_over_ranks(waited_seconds - self.waited_seconds, world)
        return {
            "data_wait_seconds": round(waited / (step - self.step), 6),
            "data_wait_share": round(waited / (time.perf_counter() - self.started), 6),
        }


class UpdateSize:
    """How far an update moved the trained weights: norms of them and of the difference. Made before the update.

    Holds a copy of this process's weights, so it is made on logged steps only.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._before = [parameter.detach().clone() for parameter in self._trained]

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        """`param_norm` after the update and `update_ratio`, the difference's norm over it; scalars on the device."""
        now = [parameter.detach() for parameter in self._trained]
        moved = [after - before for after, before in zip(now, self._before, strict=True)]
        norm, change = (over_stages(self._model, squared_norm(one)).sqrt() for one in (now, moved))
        return {"param_norm": norm, "update_ratio": change / norm}


def speed_metrics(
    rate: float, flops_per_token: float, causal_flops_per_token: float, peak: float | None, devices: int
) -> dict[str, Any]:
    """Tokens per second and MFU by both conventions for causal attention.

    Args:
        rate: tokens per second.
        flops_per_token: with all pairs of positions counted, as PaLM (appendix B) does: `mfu`.
        causal_flops_per_token: with those that a causal mask leaves: `mfu_causal`.
        peak: of one device; both are "unknown" without it.
        devices: how many compute.
    """
    return {
        "tokens_per_second": round(rate, 1),
        "mfu": model_flops_utilisation(rate, flops_per_token, peak, devices),
        "mfu_causal": model_flops_utilisation(rate, causal_flops_per_token, peak, devices),
    }


def peak_memory_bytes(device: torch.device, world: World) -> int:
    """The most memory that any rank has held so far: allocated on its GPU, or resident on a CPU.

    Every rank calls this together.
    """
    if device.type == "cuda":
        return int(max_over_ranks(float(torch.cuda.max_memory_allocated(device)), world))
    return int(max_over_ranks(float(peak_resident_bytes()), world))


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
