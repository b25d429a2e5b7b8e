"""What a terminal shows of a run: a line per stage, and a progress bar with rate and time left where there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from gristmill.flows.running.process import Event
from gristmill.flows.running.progress import describe_metrics
from gristmill.flows.running.run import Outcome
from gristmill.flows.stages.plan import Node
from gristmill.flows.store.store import StageFolder

MARKS = {"Cached": ("=", "cyan"), "Completed": ("+", "green"), "Resumed": ("+", "green")}
PLAIN_SECONDS = 10.0


def plain_console(file: TextIO | None = None, stderr: bool = False) -> Console:
    """A console that prints every text as it is: brackets and colons of the user's are not markup.

    Args:
        file: where to print, instead of standard output.
        stderr: print to standard error.
    """
    return Console(file=file, stderr=stderr, markup=False, emoji=False, highlight=False)


class LastingStream:
    """Standard output of a run: a reader that goes away (`| head`, a closed terminal) does not end the run."""

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
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class TerminalObserver:
    """Prints a run. On a terminal with a moving bar, elsewhere in plain lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._job = ""
        self._last_line = 0.0

    def stage_started(self, node: Node, resuming: bool, folder: StageFolder) -> None:
        """See Observer."""
        self._job, self._last_line = "", time.monotonic()
        if resuming:
            self._console.print(f"  {node.name}: resumes where it stopped", style="dim")
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("  {task.description}", markup=False), BarColumn(bar_width=None),
            TextColumn("{task.fields[count]}", markup=False), TimeRemainingColumn(compact=True),
            console=self._console, transient=True, expand=True,
        )
        self._task = self._bar.add_task(node.name, total=None, count="")
        self._bar.start()

    def stage_waits(self, node: Node, owner: Mapping[str, Any]) -> None:
        """See Observer."""
        self._console.print(f"  {node.name}: another run (process {owner['pid']} on {owner['host']}) is making this "
                            "output; waiting for it", style="yellow")

    def stage_event(self, node: Node, event: Event) -> None:
        """See Observer."""
        if event["event"] == "warning":
            self._console.print(Text(f"  {node.name}: {event['message']}", style="yellow"))
        if event["event"] != "progress":
            return
        job = event.get("job") or node.name
        what = node.name if job == node.name else f"{node.name} {job}"
        count = f"{event['done']:g}/{event['total']:g} {event['unit']}"
        details = "".join(f", {part}" for part in describe_metrics(event))
        if self._bar is not None and self._task is not None:
            if what != self._job:
                self._job = what
                self._bar.reset(self._task)
            self._bar.update(self._task, description=what, completed=event["done"], total=event["total"],
                             count=count + details)
        elif time.monotonic() - self._last_line >= PLAIN_SECONDS:
            self._last_line = time.monotonic()
            self._console.print(Text(f"  {what}: {count}{details}"))

    def stage_finished(self, node: Node, outcome: Outcome) -> None:
        """See Observer."""
        self.stop_bar()
        mark, style = MARKS[outcome.how]
        line = Text(f"{mark} ", style=style)
        line.append(f"{node.name:<10}", style="bold")
        line.append(f" {outcome.how:<10}", style=style)
        if outcome.how != "Cached":
            line.append(f"{outcome.seconds:7.1f} s")
        if outcome.note:
            line.append(f"  {outcome.note}", style="dim")
        self._console.print(line)

    def stop_bar(self) -> None:
        """Take the bar away, whatever happened."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._task = None, None
