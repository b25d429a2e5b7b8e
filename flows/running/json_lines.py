"""A run as JSON lines."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from gristmill.core.secrets import mask_addresses
from gristmill.flows.running.events import (
    RunEnded,
    RunEvent,
    StageEvent,
    StageFailed,
    StageFinished,
    StageOutput,
    StageProgress,
    StageStarted,
    StageStopping,
    StageWarning,
)
from gristmill.flows.running.terminal import PLAIN_SECONDS

LEVELS: dict[type[RunEvent] | str, str] = {
    StageFailed: "error",
    StageWarning: "warning",
    StageStopping: "warning",
    "failed": "error",
    "interrupted": "warning",
}
"""Class of an event, or state of a run at its end -> level; `info` of all others."""


class JsonLines:
    """Writer of JSON objects with `time`, `level`, `event` and the event's values, one a
    line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

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


class JsonHandler(logging.Handler):
    """Log handler that writes records as JSON lines."""

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
    """Observer that writes a run as JSON lines: the class of each event as its name
    (`stage_started`), its stage, and its fields.
    """

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._written: dict[str, float] = {}

    def __call__(self, event: RunEvent) -> None:
        """Write an event; progress now and then, and no lines that a stage prints."""
        if isinstance(event, StageOutput):
            return
        if isinstance(event, StageProgress):
            stage, now = event.node.name, time.monotonic()
            is_due = now - self._written.get(stage, 0.0) >= PLAIN_SECONDS
            if event.done < event.total and not is_due:
                return
            self._written[stage] = now
        values = dict(vars(event))
        if isinstance(event, StageEvent):
            values["stage"] = values.pop("node").name
        if isinstance(event, StageFinished):
            values |= vars(values.pop("outcome"))
        if isinstance(event, StageStarted | StageFinished):
            values["folder"] = values["folder"].path
        kind = type(event)
        self._lines.log(
            re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower(),
            LEVELS.get(event.state if isinstance(event, RunEnded) else kind, "info"),
            **{
                key: str(value) if isinstance(value, Path) else value
                for key, value in values.items()
                if value not in ("", None)
            },
        )
