"""The one DoFn of every job. Beam ships it to its workers by this module's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics

from gristmill.dataprep.files import as_path
from gristmill.dataprep.jobs.engine import Process, Task, finish_task
from gristmill.dataprep.jobs.job_errors import failure_path, note_failure


class DoTask(beam.DoFn):
    """Runs a task and counts every decision as a Beam counter named stage/rule.

    What the task raises is noted, and nothing more is begun: to Beam it is a task that had no output.
    """

    def __init__(self, stage: str, process: Process, records: str) -> None:
        self._stage, self._process, self._records = stage, process, records

    def process(self, element: tuple[str, Mapping[str, Any]]) -> Iterator[str]:  # type: ignore[override]
        """Run the task of this name and payload."""
        name, payload = element
        records = as_path(self._records)
        if failure_path(records).exists():
            return
        try:
            result = finish_task(Task(name, payload), self._process, records)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job ends with it
            note_failure(records, name, error)
            return
        counts = result.get("counts", {})
        for key in ("read", "kept", "quarantined"):
            Metrics.counter(self._stage, key).inc(int(counts.get(key, 0)))
        for rule, number in counts.get("dropped", {}).items():
            Metrics.counter(self._stage, rule).inc(int(number))
        yield name
