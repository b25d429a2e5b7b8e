"""Throughput, MFU, memory use, update sizes, and an optional profiler trace."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from gristmill.core.processes import peak_resident_bytes
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import Profile
from gristmill.train.distributed.process_groups import World, max_over_ranks
from gristmill.train.loop.objective import Numbers
from gristmill.train.models.tensor_files import Tensors
from gristmill.train.optim.dtensor_sums import total_norm, trainable
from gristmill.train.planning.devices import find_device

MOST_ALLOCATIONS = 1_000_000
"""Maximum number of allocations and frees in a memory snapshot."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense bfloat16 peak of a device, or None if unknown."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    spec = find_device(torch.cuda.get_device_name(device))
    return None if spec is None else spec.flops


@dataclass(frozen=True)
class Utilisation:
    """Bounds that the speed of a training is compared with (MFU).

    Attributes:
        peak_flops: of one device, if known.
        causal_share: share of the objective's FLOPs that remains if masked attention is
            not counted.
    """

    peak_flops: float | None = None
    causal_share: float = 1.0

    def mfu(self, flops_per_second: float) -> dict[str, float | Literal["unknown"]]:
        """`mfu`, model FLOPs per second of a device over its peak with attention of all
        pairs of positions (PaLM, appendix B), and `mfu_causal` with that of unmasked
        pairs; "unknown" without a peak.
        """
        if self.peak_flops is None:
            return {"mfu": "unknown", "mfu_causal": "unknown"}
        share = flops_per_second / self.peak_flops
        return {"mfu": share, "mfu_causal": share * self.causal_share}


class Clock:
    """Time, tokens and data wait since the last logged step.

    The first interval starts after the first step, which includes compilation and the
    wait for the first batch, unless that step itself is logged.

    Args:
        tokens, step: tokens read and steps done before the attempt.
    """

    def __init__(self, tokens: int, step: int) -> None:
        self.restart(tokens, step, 0.0)
        self._is_warm = False

    def restart(self, tokens: int, step: int, waited_seconds: float) -> None:
        """Restart the clock; `waited_seconds` is the total wait for batches so far."""
        self.started = time.perf_counter()
        self.tokens = tokens
        self.step = step
        self.waited_seconds = waited_seconds
        self._is_warm = True

    def skip_first_step(self, tokens: int, step: int, waited_seconds: float) -> None:
        """Restart after the first step; called after each step that is not logged."""
        if not self._is_warm:
            self.restart(tokens, step, waited_seconds)

    def rate(self, tokens: int) -> float:
        """Tokens per second since the start."""
        return (tokens - self.tokens) / (time.perf_counter() - self.started)

    def data_wait(self, step: int, waited_seconds: float, world: World) -> Numbers:
        """Mean data wait per step on the slowest rank since the start, in seconds and
        as a share of the step time.

        This is a collective.
        """
        waited = max_over_ranks(waited_seconds - self.waited_seconds, world)
        return {
            "data_wait_seconds": round(waited / (step - self.step), 6),
            "data_wait_share": round(waited / (time.perf_counter() - self.started), 6),
        }


class UpdateSize:
    """Norms of the trained weights and of an update; created before the update.

    Holds a copy of the local weights, so it is created only for logged steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._trained = [parameter for _, parameter in trainable(model)]
        self._before = [parameter.detach().clone() for parameter in self._trained]

    @torch.no_grad()
    def norms(self) -> Tensors:
        """`param_norm` after the update, and `update_ratio`, the norm of the update
        over it; scalars on the device.
        """
        weights = [parameter.detach() for parameter in self._trained]
        differences = [
            after - before for after, before in zip(weights, self._before, strict=True)
        ]
        norm, change = total_norm(weights), total_norm(differences)
        return {"param_norm": norm, "update_ratio": change / norm}


def peak_memory_bytes(device: torch.device, world: World) -> int:
    """Peak memory over all ranks: allocated on the GPU, or resident on a CPU.

    This is a collective.
    """
    if device.type == "cuda":
        return int(
            max_over_ranks(float(torch.cuda.max_memory_allocated(device)), world)
        )
    return int(max_over_ranks(float(peak_resident_bytes()), world))


class Profiler:
    """Run PyTorch's profiler at the steps of a section; without a section it does
    nothing.

    Args:
        section: steps to trace.
        context: receives the trace.
        world: the processes; each writes a trace of its own.
        step: steps done; a training that resumes after the traced steps traces nothing.
    """

    def __init__(
        self, section: Profile | None, context: Context, world: World, step: int
    ) -> None:
        self._section = section
        self._context = context
        self._world = world
        self._profile: Any = None
        self.after(step)

    def after(self, step: int) -> None:
        """Start or stop the profiler after a step, if due."""
        if self._section is None:
            return
        if (
            self._profile is not None
            and step >= self._section.first_step + self._section.steps - 1
        ):
            self.close()
        if step == self._section.first_step - 1:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._world.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                if self._section.memory:
                    torch.cuda.memory._record_memory_history(
                        max_entries=MOST_ALLOCATIONS
                    )
            elif self._section.memory:
                self._context.warn(
                    "engine.profile.memory: there is no GPU whose allocations could be "
                    "recorded"
                )
            self._profile = torch.profiler.profile(
                activities=activities, record_shapes=True
            )
            self._profile.start()

    def close(self) -> None:
        """Write the trace so far."""
        if self._profile is None or self._section is None:
            return
        profile = self._profile
        self._profile = None
        profile.stop()
        folder = self._context.work / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"rank-{self._world.rank}.json.gz"))
        if self._section.memory and self._world.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(
                str(folder / f"rank-{self._world.rank}-memory.pickle")
            )
            torch.cuda.memory._record_memory_history(enabled=None)
