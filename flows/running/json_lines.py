"""A run as JSON lines."""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import UTC, datetime
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
    """Writes JSON objects with `time`, `level`, `event` and the event's values, one a
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
    """Writes a run as JSON lines: `run_started`, `stage_started`, `stage_waits`,
    `progress`, `warning`, `stopping`, `stage_finished`, `stage_failed`, `run_finished`.
    """

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._written: dict[str, float] = {}

    def __call__(self, event: RunEvent) -> None:
        """Write an event."""
        if isinstance(event, StageEvent):
            self._write_stage_event(event, event.node.name)
        elif isinstance(event, RunStarted):
            self._lines.log(
                "run_started",
                manifest=event.manifest_file,
                name=event.name,
                stages=event.stages,
            )
        elif isinstance(event, RunNotice):
            self._lines.log("message", message=event.message)
        elif isinstance(event, RunEnded) and event.folder is not None:
            self._lines.log(
                "run_finished",
                state=event.state,
                run=event.folder.name,
                folder=str(event.folder),
            )
        elif isinstance(event, RunEnded):
            level = "error" if event.state == "failed" else "warning"
            self._lines.log(
                "run_finished", level, state=event.state, message=event.message
            )

    def _write_stage_event(self, event: StageEvent, stage: str) -> None:
        match event:
            case StageStarted():
                self._lines.log(
                    "stage_started",
                    stage=stage,
                    resuming=event.resuming,
                    fingerprint=event.node.fingerprint[:16],
                    folder=str(event.folder.path),
                )
            case StageWaits():
                self._lines.log(
                    "stage_waits", stage=stage, host=event.host, pid=event.pid
                )
            case StageWarning():
                self._lines.log(
                    "warning", "warning", stage=stage, message=event.message
                )
            case StageStopping():
                self._lines.log(
                    "stopping", "warning", stage=stage, seconds=event.seconds
                )
            case StageProgress():
                self._write_progress(event, stage)
            case StageFinished(outcome=outcome):
                self._lines.log(
                    "stage_finished",
                    stage=stage,
                    how=outcome.how,
                    seconds=round(outcome.seconds, 3),
                    folder=str(outcome.folder.path),
                    note=outcome.note,
                )
            case StageFailed():
                self._lines.log(
                    "stage_failed", "error", stage=stage, message=event.message
                )

    def _write_progress(self, event: StageProgress, stage: str) -> None:
        now = time.monotonic()
        is_due = now - self._written.get(stage, 0.0) >= PLAIN_SECONDS
        if event.done >= event.total or is_due:
            self._written[stage] = now
            values = {
                key: value
                for key, value in vars(event).items()
                if key != "node" and value not in ("", None)
            }
            self._lines.log("progress", stage=stage, **values)
