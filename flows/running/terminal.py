"""Terminal output of a run: a line per stage, and a progress bar with rate and
remaining time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from gristmill.core.progress import describe_metrics
from gristmill.flows.running.events import (
    RunEnded,
    RunEvent,
    RunNotice,
    RunRecorded,
    StageEvent,
    StageFailed,
    StageFinished,
    StageProgress,
    StageStarted,
    StageStopping,
    StageWaits,
    StageWarning,
)

MARKS = {
    "Cached": ("=", "cyan"),
    "Completed": ("+", "green"),
    "Resumed": ("+", "green"),
}
PLAIN_SECONDS = 10.0
LEAST_NAME = 10
"""Width of the names of stages if they are unknown."""


def plain_console(file: TextIO | None = None, stderr: bool = False) -> Console:
    """Console that prints texts literally: the user's brackets and colons are not
    markup.

    Args:
        file: output file instead of standard output.
        stderr: print to standard error.
    """
    # Notebooks get plain text too: rich would frame every line.
    return Console(
        file=file,
        stderr=stderr,
        markup=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,
    )


def visible(text: str) -> str:
    """Text of a document safe for a terminal: control characters and marks of writing
    direction become visible symbols. Line breaks and tabs stay.
    """
    return text.translate(_SIGNS)


_HIDDEN = (
    *range(0x80, 0xA0),
    0x200E,
    0x200F,
    *range(0x202A, 0x202F),
    0x2028,
    0x2029,
    *range(0x2066, 0x206A),
    0xFEFF,
)
"""C1 control characters, and Unicode's marks of direction, line, paragraph and byte
order.
"""
_SIGNS = {
    # Unicode has a picture of each ASCII control character; the others are shown by
    # number.
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"<{code:02x}>" for code in _HIDDEN},
}


class LastingStream:
    """Standard output of a run, which outlives its reader (`| head`, a closed
    terminal).
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or go silent for good."""
        try:
            return self._stream.write(text)
        except OSError:
            self._go_silent()
            return len(text)

    def flush(self) -> None:
        """Flush, or go silent for good."""
        try:
            self._stream.flush()
        except OSError:
            self._go_silent()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _go_silent(self) -> None:
        # The interpreter flushes standard output once more when it ends.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, self._stream.fileno())
        os.close(null_device)


class TerminalObserver:
    """Prints a run: on a terminal with a progress bar for each running stage, elsewhere
    in plain lines.

    Args:
        console: output.
        stages: names of the stages, for the width of their column.
    """

    def __init__(self, console: Console, stages: Iterable[str] = ()) -> None:
        self._console = console
        self._width = max(map(len, stages), default=LEAST_NAME)
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._jobs: dict[str, str] = {}
        self._lines: dict[str, float] = {}

    def __call__(self, event: RunEvent) -> None:
        """Show an event."""
        match event:
            case RunNotice():
                self._console.print(Text(event.message, style="dim"))
            case RunRecorded():
                self.stop_bars()
            case RunEnded() if event.message:
                text = Text(event.message, style="red")
                plain_console(stderr=True).print(text, soft_wrap=True)
            case StageStarted():
                self._start_bar(event.node.name, event.resuming)
            case StageWaits():
                self._note(
                    event,
                    f"waiting for another run (process {event.pid} on {event.host}), "
                    "which is making this output",
                )
            case StageWarning():
                self._note(event, event.message)
            case StageStopping():
                self._note(
                    event,
                    "is stopping, and saves its progress first, in at most "
                    f"{event.seconds:g} s",
                )
            case StageProgress():
                self._show_progress(event, event.node.name)
            case StageFinished(outcome=outcome):
                line = self._end_line(event, MARKS[outcome.how], outcome.how)
                if outcome.how != "Cached":
                    line.append(f"{outcome.seconds:7.1f} s")
                if outcome.note:
                    line.append(f"  {outcome.note}", style="dim")
                self._console.print(line)
            case StageFailed(node=node):
                reason = event.message.splitlines()[0].removeprefix(f"{node.name}: ")
                line = self._end_line(event, ("!", "red"), "Failed")
                self._console.print(line.append(f"  {reason}", style="dim"))

    def stop_bars(self) -> None:
        """Remove all bars."""
        with self._lock:
            if self._bars is not None:
                self._bars.stop()
            self._bars = None
            self._tasks = {}

    def _note(self, event: StageEvent, message: str) -> None:
        line = Text(f"  {event.node.name}: {message}", style="yellow")
        self._console.print(line, soft_wrap=True)

    def _start_bar(self, stage: str, resuming: bool) -> None:
        self._jobs[stage] = ""
        self._lines[stage] = time.monotonic()
        if resuming:
            self._console.print(f"  {stage}: resumes where it stopped", style="dim")
        if not self._console.is_terminal:
            return
        with self._lock:
            if self._bars is None:
                self._bars = Progress(
                    TextColumn("  {task.description}", markup=False),
                    BarColumn(bar_width=None),
                    TextColumn("{task.fields[count]}", markup=False),
                    TimeRemainingColumn(compact=True),
                    console=self._console,
                    transient=True,
                    expand=True,
                )
                self._bars.start()
            self._tasks[stage] = self._bars.add_task(stage, total=None, count="")

    def _show_progress(self, event: StageProgress, stage: str) -> None:
        label = stage if event.job in ("", stage) else f"{stage} {event.job}"
        count = f"{event.done:g}/{event.total:g} {event.unit}"
        details = "".join(f", {part}" for part in describe_metrics(vars(event)))
        with self._lock:
            if self._bars is not None and stage in self._tasks:
                task = self._tasks[stage]
                if label != self._jobs[stage]:
                    self._jobs[stage] = label
                    self._bars.reset(task)
                self._bars.update(
                    task,
                    description=label,
                    completed=event.done,
                    total=event.total,
                    count=count + details,
                )
                return
        if time.monotonic() - self._lines[stage] >= PLAIN_SECONDS:
            self._lines[stage] = time.monotonic()
            self._console.print(Text(f"  {label}: {count}{details}"))

    def _end_line(self, event: StageEvent, mark: tuple[str, str], state: str) -> Text:
        """Remove a stage's bar, and return the start of its last line."""
        with self._lock:
            task = self._tasks.pop(event.node.name, None)
            if self._bars is not None and task is not None:
                self._bars.remove_task(task)
                if not self._tasks:
                    self._bars.stop()
                    self._bars = None
        sign, style = mark
        line = Text(f"{sign} ", style=style)
        line.append(f"{event.node.name:<{self._width}}", style="bold")
        return line.append(f" {state:<10}", style=style)
