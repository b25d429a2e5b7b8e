"""Progress of a stage as text (done of total, rate, time left), and a rate limit for
log lines in Prefect.
"""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.flows.questions.status import duration
from gristmill.flows.running.events import StageProgress

LINES_PER_SECOND = 5.0
"""Log lines of a stage per second that a Prefect server handles easily (1 to 2 ms
each).
"""
BURST_LINES = 50.0
SLOW_PER_SECOND = 0.1
"""Lower rates are reported as seconds per unit."""


@dataclass
class Pace:
    """Progress of one job of a stage since its first report.

    Attributes:
        started: time of the first report, in seconds of any clock.
        first_done: amount done then, which earlier attempts did and the rate excludes.
        job: name of the job.
    """

    started: float
    first_done: float
    job: str = ""

    @classmethod
    def begin(cls, event: StageProgress, now: float) -> Pace:
        """Start with a first report."""
        return cls(now, event.done, event.job)

    def describe(self, event: StageProgress, now: float) -> str:
        """Progress as text, e.g. `step 120 of 400, loss 3.214, 61,440 tokens, 2,048
        tokens/s, 2 m 20 s left`.
        """
        parts = [f"{event.done:,g} of {event.total:,g} {event.unit}"]
        if event.loss is not None:
            parts.append(f"loss {event.loss:.4f}")
        if event.tokens is not None:
            parts.append(f"{event.tokens:,.0f} tokens")
        if event.tokens_per_second is not None:
            parts.append(f"{event.tokens_per_second:,.0f} tokens/s")
        seconds = now - self.started
        done = event.done - self.first_done
        if seconds > 0 and done > 0:
            rate = done / seconds
            if event.tokens_per_second is None:
                if rate < SLOW_PER_SECOND:
                    parts.append(
                        f"{1 / rate:,.3g} s per {event.unit.removesuffix('s')}"
                    )
                else:
                    parts.append(f"{rate:,.3g} {event.unit}/s")
            if event.done < event.total:
                parts.append(f"{duration((event.total - event.done) / rate)} left")
        text = ", ".join(parts)
        return f"{self.job}: {text}" if self.job else text


@dataclass
class LineBudget:
    """Rate limit of `LINES_PER_SECOND` with bursts of `BURST_LINES`; counts suppressed
    lines.

    A training that prints a line per step must not be slowed down by its display; the
    log file has all lines.
    """

    available: float = BURST_LINES
    last: float | None = None
    held_back: int = 0

    def allows(self, now: float) -> bool:
        """True if one more line may be shown now."""
        if self.last is not None:
            self.available = min(
                BURST_LINES, self.available + (now - self.last) * LINES_PER_SECOND
            )
        self.last = now
        if self.available < 1.0:
            self.held_back += 1
            return False
        self.available -= 1.0
        return True

    def take_held_back(self) -> int:
        """Number of lines suppressed since the last call."""
        count = self.held_back
        self.held_back = 0
        return count
