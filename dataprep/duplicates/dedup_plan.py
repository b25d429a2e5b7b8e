"""What all tasks of the stage `dedup` have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.dataprep.duplicates.dedup_index import Index
from gristmill.dataprep.duplicates.numbering import Numbering
from gristmill.dataprep.jobs.engine import Task
from gristmill.mixtures.dedup import Dedup


@dataclass(frozen=True)
class Plan:
    """What the tasks of the stage have in common."""

    inputs: Mapping[str, Path]
    section: Dedup
    indexes: Sequence[Index]
    numbering: Numbering
    num_partitions: int
    work: Path
    out: Path

    def path(self, job: str, name: str) -> Path:
        """The Arrow file that a task of a job leaves in the work folder."""
        return self.work / job / f"{name}.arrow"

    def index_of(self, documents: np.ndarray) -> np.ndarray:
        """Which of `indexes` holds each of some older documents: int64, positions."""
        sizes = [len(index.files) for index in self.indexes]
        owners = np.repeat(np.arange(len(sizes)), sizes)
        places: np.ndarray = owners[self.numbering.shards_of(documents) - self.numbering.num_new_shards]
        return places

    def partitions(self) -> list[Task]:
        """One task per partition of the keys, and of the pairs."""
        return tasks_of(self.num_partitions)


def tasks_of(num_partitions: int) -> list[Task]:
    """One task per partition."""
    return [Task(f"{number:05d}", {"partition": number}) for number in range(num_partitions)]
