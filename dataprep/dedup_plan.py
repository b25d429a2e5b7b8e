"""What all tasks of the stage `dedup` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gristmill.dataprep.engine import Task
from gristmill.dataprep.sketches import Numbering
from gristmill.mixtures.dedup import Dedup


@dataclass(frozen=True)
class Plan:
    """What the tasks of the stage have in common."""

    inputs: Mapping[str, Path]
    section: Dedup
    numbering: Numbering
    num_partitions: int
    work: Path
    out: Path

    def path(self, job: str, name: str) -> Path:
        """The Arrow file that a task of a job leaves in the work folder."""
        return self.work / job / f"{name}.arrow"

    def partitions(self) -> list[Task]:
        """One task per partition."""
        return [Task(f"{number:05d}", {"partition": number}) for number in range(self.num_partitions)]
