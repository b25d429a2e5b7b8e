"""A run as JSON lines."""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import UTC, datetime
from functools import partial
from typing import Any, TextIO

from gristmill.core.secrets import mask_addresses
from gristmill.flows.running.events import (
    RunEnded,
    RunEvent,
    RunNotice,
    RunStarted,
    StageEvent,
    StageFailed,
    StageFinished,
    StageProgress,
    StageStarted,
    StageStopping,
    StageWaits,
    StageWarning,
)
from gristmill.flows.running.terminal import PLAIN_SECONDS


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
    """Observer that writes a run as JSON lines: `run_started`, `stage_started`,
    `stage_waits`, `progress`, `warning`, `stopping`, `stage_finished`, `stage_failed`,
    `run_finished`.
    """

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._written: dict[str, float] = {}

    def __call__(self, event: RunEvent) -> None:
        """Write an event."""
        write = self._lines.log
        if isinstance(event, StageEvent):
            write = partial(write, stage=event.node.name)
        match event:
            case RunStarted():
                write(
                    "run_started",
                    manifest=event.manifest_file,
                    name=event.name,
                    stages=event.stages,
                )
            case RunNotice():
                write("message", message=event.message)
            case RunEnded() if event.folder is not None:
                write(
                    "run_finished",
                    state=event.state,
                    run=event.folder.name,
                    folder=str(event.folder),
                )
            case RunEnded():
                level = "error" if event.state == "failed" else "warning"
                write("run_finished", level, state=event.state, message=event.message)
            case StageStarted():
                write(
                    "stage_started",
                    resuming=event.resuming,
                    fingerprint=event.node.fingerprint[:16],
                    folder=str(event.folder.path),
                )
            case StageWaits():
                write("stage_waits", host=event.host, pid=event.pid)
            case StageWarning():
                write("warning", "warning", message=event.message)
            case StageStopping():
                write("stopping", "warning", seconds=event.seconds)
            case StageProgress(node=node):
                now = time.monotonic()
                is_due = now - self._written.get(node.name, 0.0) >= PLAIN_SECONDS
                if event.done >= event.total or is_due:
                    self._written[node.name] = now
                    values = {
                        key: value
                        for key, value in vars(event).items()
                        if key != "node" and value not in ("", None)
                    }
                    write("progress", **values)
            case StageFinished(outcome=outcome):
                write(
                    "stage_finished",
                    how=outcome.how,
                    seconds=round(outcome.seconds, 3),
                    folder=str(outcome.folder.path),
                    note=outcome.note,
                )
            case StageFailed():
                write("stage_failed", "error", message=event.message)
