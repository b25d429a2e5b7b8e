"""Observers of a run: a group of observers, and one that writes JSON lines."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from gristmill.core.secrets import mask_addresses
from gristmill.core.store import StageFolder
from gristmill.flows.running.process import Event
from gristmill.flows.running.run import Observer, Outcome
from gristmill.flows.running.terminal import PLAIN_SECONDS
from gristmill.flows.stages.plan import Node


class Observers:
    """Forwards all calls to several observers, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def stage_started(self, node: Node, resuming: bool, folder: StageFolder) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.stage_started(node, resuming, folder)

    def stage_waits(self, node: Node, owner: Mapping[str, Any]) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.stage_waits(node, owner)

    def stage_event(self, node: Node, event: Event) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.stage_event(node, event)

    def stage_finished(self, node: Node, outcome: Outcome) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.stage_finished(node, outcome)

    def stage_failed(self, node: Node, message: str) -> None:
        """See Observer."""
        for observer in self._observers:
            observer.stage_failed(node, message)


class JsonLines:
    """Text stream that writes every line as a JSON object with `time`, `level`, `event`
    and the event's values.

    Lines of text have the event `message`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._unfinished = ""

    def log(self, event: str, level: str = "info", **values: Any) -> None:
        """Write one line."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "event": event,
            **values,
        }
        with self._lock:
            self._stream.write(
                json.dumps(mask_addresses(line), ensure_ascii=False) + "\n"
            )
            self._stream.flush()

    def write(self, text: str) -> int:
        """Write text, line by line."""
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            if line.strip():
                self.log("message", message=line.strip())
        return len(text)

    def flush(self) -> None:
        """Do nothing: every line is flushed when written."""

    def isatty(self) -> bool:
        """False, so no progress bars are shown."""
        return False


class JsonHandler(logging.Handler):
    """Writes log records as JSON lines."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self._lines.log(
            "message",
            record.levelname.lower(),
            logger=record.name,
            message=record.getMessage(),
        )


class JsonObserver:
    """Writes a run as JSON lines: `stage_started`, `stage_waits`, `progress`,
    `warning`, `stage_finished`, `stage_failed`.
    """

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._written: dict[str, float] = {}

    def stage_started(self, node: Node, resuming: bool, folder: StageFolder) -> None:
        """See Observer."""
        self._lines.log(
            "stage_started",
            stage=node.name,
            resuming=resuming,
            fingerprint=node.fingerprint[:16],
            folder=str(folder.path),
        )

    def stage_waits(self, node: Node, owner: Mapping[str, Any]) -> None:
        """See Observer."""
        self._lines.log(
            "stage_waits", stage=node.name, host=owner["host"], pid=owner["pid"]
        )

    def stage_event(self, node: Node, event: Event) -> None:
        """See Observer."""
        values = {key: value for key, value in event.items() if key != "event"}
        if event["event"] in ("warning", "stopping"):
            self._lines.log(event["event"], "warning", stage=node.name, **values)
        if event["event"] != "progress":
            return
        now = time.monotonic()
        if (
            event["done"] >= event["total"]
            or now - self._written.get(node.name, 0.0) >= PLAIN_SECONDS
        ):
            self._written[node.name] = now
            self._lines.log("progress", stage=node.name, **values)

    def stage_finished(self, node: Node, outcome: Outcome) -> None:
        """See Observer."""
        self._lines.log(
            "stage_finished",
            stage=node.name,
            how=outcome.how,
            seconds=round(outcome.seconds, 3),
            folder=str(outcome.folder.path),
            note=outcome.note,
        )

    def stage_failed(self, node: Node, message: str) -> None:
        """See Observer."""
        self._lines.log("stage_failed", "error", stage=node.name, message=message)

    def stop_bar(self) -> None:
        """Do nothing: there are no bars."""
