"""State of the loop in checkpoints, besides weights and moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NotRequired, Protocol, TypedDict

from torch import Tensor

from gristmill.train.loop.callbacks import Stop
from gristmill.train.models.tensor_files import Tensors

StateTensors = dict[str, Tensor | Tensors]
"""State of the loop on the device, by name, and within each part."""


class Part(Protocol):
    """Component with state on the device (averaged weights, ...)."""

    def tensors(self) -> Tensors:
        """State for a checkpoint, loaded in place."""


@dataclass(frozen=True)
class Seen:
    """Step whose flags the host has not read yet. Scalars on the device, equal on every
    rank.

    Attributes:
        step: counted from 1.
        bad: true if the update was skipped.
        loss, norm: of the step.
        mean, deviation: of the losses before the step.
        row_losses: of this rank's micro-batches, from Objective.loss, in half
            precision.
    """

    step: int
    bad: Tensor
    loss: Tensor
    norm: Tensor
    mean: Tensor
    deviation: Tensor
    row_losses: list[Tensor]


class CheckpointState(TypedDict):
    """State of the loop in a checkpoint's marker, as JSON; see LoopState.

    Attributes:
        rows_of: fingerprint of the rows.
        began_with: stage -> fingerprint of the models that the training started from.
        callbacks: state of the callbacks, by their hash.
    """

    digest: str
    tokens: int
    skipped: int
    best: float | None
    stale: int
    stopped: Stop | None
    rows_of: str
    began_with: NotRequired[dict[str, str]]
    callbacks: NotRequired[dict[str, object]]


@dataclass
class LoopState:
    """Progress of a training. Tensors are on the device and equal on every rank.

    Attributes:
        window: see spikes.empty_window.
        sums: since the last logged step, without skipped steps: weight, then the
            objective's sums.
        digest: rolling hash of all rows read, see `batch_plan.extend_digest`.
        parts: further components with state on the device, by name.
        step: optimizer steps done, skipped ones included.
        tokens: tokens read.
        skipped: number of skipped updates up to the last read of the device.
        best, stale: best held-out loss, and validations since then.
        stopped: end of the training that a callback asked for.
        seen: steps whose flags the host has not read yet.
    """

    window: Tensor
    sums: Tensor
    digest: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    best: float | None = None
    stale: int = 0
    stopped: Stop | None = None
    seen: list[Seen] = field(default_factory=list)

    def tensors(self) -> StateTensors:
        """State on the device."""
        return {
            "window": self.window,
            "sums": self.sums,
            **{name: part.tensors() for name, part in self.parts.items()},
        }

    def plain(self, fingerprint: str) -> CheckpointState:
        """JSON part of the state, with the fingerprint of the rows."""
        return {
            "digest": self.digest,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "best": self.best,
            "stale": self.stale,
            "stopped": self.stopped,
            "rows_of": fingerprint,
        }

    def restore(self, step: int, plain: CheckpointState) -> None:
        """Restore the state of a checkpoint whose tensors are loaded already."""
        self.step = step
        self.digest = plain["digest"]
        self.tokens = plain["tokens"]
        self.skipped = plain["skipped"]
        self.best = plain["best"]
        self.stale = plain["stale"]
        self.stopped = plain["stopped"]
        self.seen.clear()
