"""How far a stage is, in words: done of total, rate, time left; and how many log lines a window may be sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from gristmill.flows.running.process import Event

LINES_PER_SECOND = 5.0
"""As many log lines of a stage as a Prefect server takes without being noticed (1 to 2 ms each)."""
BURST_LINES = 50.0
SLOW_PER_SECOND = 0.1
"""What is done less often is reported by how long it takes."""


@dataclass
class Pace:
    """The progress of one job of a stage, from its first report on.

    Attributes:
        started: time of the first report, in seconds of any clock.
        first_done: how much was done then; what an attempt before this one did says nothing about the rate.
        job: of which the stage reports.
    """

    started: float
    first_done: float
    job: str = ""

    @classmethod
    def begin(cls, event: Event, now: float) -> Pace:
        """Begin with a first report."""
        return cls(now, event["done"], event.get("job", ""))

    def describe(self, event: Event, now: float) -> str:
        """For example `step 120 of 400, loss 3.214, 61,440 tokens, 2,048 tokens/s, 2:20 left`."""
        unit = str(event["unit"])
        parts = [f"{event['done']:,g} of {event['total']:,g} {unit}"]
        if "loss" in event:
            parts.append(f"loss {event['loss']:.4f}")
        if "tokens" in event:
            parts.append(f"{event['tokens']:,.0f} tokens")
        if "tokens_per_second" in event:
            parts.append(f"{event['tokens_per_second']:,.0f} tokens/s")
        seconds, done = now - self.started, event["done"] - self.first_done
        if seconds > 0 and done > 0:
            rate = done / seconds
            if "tokens_per_second" not in event:
                slow = f"{1 / rate:,.3g} s per {unit.removesuffix('s')}"
                parts.append(slow if rate < SLOW_PER_SECOND else f"{rate:,.3g} {unit}/s")
            if event["done"] < event["total"]:
                parts.append(f"{clock((event['total'] - event['done']) / rate)} left")
        return (f"{self.job}: " if self.job else "") + ", ".join(parts)


def clock(seconds: float) -> str:
    """`0:42`, `12:05` or `3:07:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass
class LineBudget:
    """Lets `LINES_PER_SECOND` through, `BURST_LINES` at once, and counts what it holds back.

    A training that prints a line per step must not be slowed down by those who watch it; its log file has all lines.
    """

    left: float = BURST_LINES
    last: float | None = None
    held_back: int = field(default=0)

    def allows(self, now: float) -> bool:
        """Whether one more line may be shown now."""
        if self.last is not None:
            self.left = min(BURST_LINES, self.left + (now - self.last) * LINES_PER_SECOND)
        self.last = now
        if self.left < 1.0:
            self.held_back += 1
            return False
        self.left -= 1.0
        return True

    def take_held_back(self) -> int:
        """How many lines were held back since the last call."""
        number, self.held_back = self.held_back, 0
        return number
