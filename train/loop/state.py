"""The loop's own state: what a checkpoint holds beside weights and moments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gristmill.train.loop.spikes import Streak


class Part(Protocol):
    """A piece of state that lies on the device (a loss scale, averaged weights, ...)."""

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint; filled in place when one is loaded."""


@dataclass(frozen=True)
class Seen:
    """A step that the host has not asked the device about yet. Scalars on the device, the same on every rank.

    Attributes:
        step: counted from 1.
        bad: whether its update was held back.
        overflow: whether that was only for float16's range.
        loss, norm: of the step.
        mean, deviation: of the losses before it.
        row_losses: of this rank's micro-batches, as from Objective.loss, in half precision.
    """

    step: int
    bad: Tensor
    overflow: Tensor
    loss: Tensor
    norm: Tensor
    mean: Tensor
    deviation: Tensor
    row_losses: list[Tensor]


@dataclass
class LoopState:
    """How far a training is. The tensors are on the device and the same on every rank.

    Attributes:
        window: see spikes.empty_window.
        sums: since the last logged step, without skipped steps: weight, then the objective's sums.
        digest: rolling hash of what was read, see stream.extend_digest.
        parts: further state on the device, by name.
        step: optimizer steps done, skipped ones included.
        tokens: tokens read.
        skipped, overflows: updates that did not happen, up to the last look at the device: bad steps, and those that
            left float16's range.
        streak: of bad steps.
        rollbacks: how many there were.
        best, stale: the best held-out loss, and validations since.
        stopped: which callback has ended the training, and why (see callbacks.Callbacks.tell).
        scales: what callbacks have made of the learning rate (see callbacks.Said), in order.
        seen: the steps since the last look at the device.
    """

    window: Tensor
    sums: Tensor
    digest: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    overflows: int = 0
    streak: Streak = field(default_factory=Streak)
    rollbacks: int = 0
    best: float | None = None
    stale: int = 0
    stopped: dict[str, Any] | None = None
    scales: list[dict[str, Any]] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def tensors(self) -> dict[str, Any]:
        """The part of the state that lies on the device."""
        return {"window": self.window, "sums": self.sums, **{name: part.tensors() for name, part in self.parts.items()}}

    def plain(self, fingerprint: str) -> dict[str, Any]:
        """The part of the state that is JSON, with the name of what the rows are of."""
        return {
            "digest": self.digest,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "overflows": self.overflows,
            "streak": [self.streak.length, self.streak.due],
            "rollbacks": self.rollbacks,
            "best": self.best,
            "stale": self.stale,
            "stopped": self.stopped,
            "rows_of": fingerprint,
            **({"scales": list(self.scales)} if self.scales else {}),
        }

    def scale_of(self, step: int) -> float:
        """What callbacks have made of the learning rate of a step, counted from 1: a share of the scheduled one."""
        return math.prod(one["learning_rate_scale"] for one in self.scales if one["step"] < step)

    def restore(self, step: int, plain: Mapping[str, Any]) -> None:
        """Go to a checkpoint's state; the tensors are there already."""
        self.step, self.digest, self.tokens = step, plain["digest"], plain["tokens"]
        self.skipped, self.overflows = plain["skipped"], plain["overflows"]
        self.streak, self.rollbacks = Streak(*plain["streak"]), plain["rollbacks"]
        self.best, self.stale = plain["best"], plain["stale"]
        self.stopped = plain["stopped"]
        self.scales = list(plain.get("scales", ()))
        self.seen.clear()
