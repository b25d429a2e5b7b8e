"""The DoFns of every job. Beam ships them to its workers by this module's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics

from gristmill.dataprep.files import as_path
from gristmill.dataprep.jobs.batches import Batch
from gristmill.dataprep.jobs.job_errors import failure_path, note_failure


class Deal(beam.DoFn):
    """Puts out the batches of a job with their numbers, which the next step is grouped by: whoever is free takes one.

    Beam's own Create does as much in thirteen steps, whose translation takes longer than a small job.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def process(self, element: bytes) -> Iterator[tuple[int, Batch]]:  # type: ignore[override]
        """The batches, in their order."""
        yield from enumerate(self._batches)


class DoTasks(beam.DoFn):
    """Runs the tasks of a batch and counts every decision as a Beam counter named stage/rule.

    What a task raises is noted, and nothing more is begun: to Beam it is a task that had no output.
    """

    def __init__(self, stage: str, finish: Callable[[str, Mapping[str, Any]], dict[str, Any]], records: str) -> None:
        self._stage, self._finish, self._records = stage, finish, records

    def process(self, element: tuple[int, Iterable[Batch]]) -> Iterator[str]:  # type: ignore[override]
        """Run the tasks of these names and payloads; puts out the names of those that finished."""
        records = as_path(self._records)
        for batch in element[1]:
            for name, payload in batch:
                if failure_path(records).exists():
                    return
                try:
                    result = self._finish(name, payload)
                except Exception as error:  # noqa: BLE001 - whatever it is, the job ends with it
                    note_failure(records, name, error)
                    return
                self._count(result.get("counts", {}))
                yield name

    def _count(self, counts: dict[str, Any]) -> None:
        for key in ("read", "kept", "quarantined"):
            Metrics.counter(self._stage, key).inc(int(counts.get(key, 0)))
        for rule, number in counts.get("dropped", {}).items():
            Metrics.counter(self._stage, rule).inc(int(number))
