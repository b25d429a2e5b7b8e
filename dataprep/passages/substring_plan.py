"""What all tasks of the stage `dedup_substrings` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.dataprep.duplicates.numbering import Numbering
from gristmill.dataprep.jobs.engine import Task
from gristmill.dataprep.judged_texts import JudgedTexts, read_judged
from gristmill.dataprep.shuffle import read_partition, write_partitions
from gristmill.mixtures.dedup import DedupSubstrings


@dataclass(frozen=True)
class Plan:
    """What the tasks of the stage have in common."""

    inputs: Mapping[str, Path]
    section: DedupSubstrings
    numbering: Numbering
    num_partitions: int
    work: Path
    out: Path

    def path(self, job: str, name: str) -> Path:
        """The Arrow file that a task of a job leaves in the work folder."""
        return self.work / job / f"{name}.arrow"

    @property
    def spread(self) -> int:
        """Of so many windows in a row one is an anchor: what makes `certain_words` certain."""
        return self.section.certain_words - self.section.min_words + 1

    def partitions(self) -> list[Task]:
        """One task per partition."""
        return [Task(f"{number:05d}", {"partition": number}) for number in range(self.num_partitions)]

    def read(self, task: Task) -> tuple[JudgedTexts, np.ndarray]:
        """The texts of a shard, and the number of the document of each."""
        texts = read_judged(self.inputs, task.name, self.section.sources)
        return texts, self.numbering.starts[task.payload["shard"]] + texts.good

    def send(self, job: str, shard: str, rows: dict[str, np.ndarray]) -> Path:
        """Write a shard's rows to the partitions of their `hash`."""
        path = self.path(job, shard)
        partitions = (rows["hash"] >> np.uint64(32)).astype(np.int64) % self.num_partitions
        write_partitions(path, _table(rows), partitions, self.num_partitions)
        return path

    def receive(self, job: str, partition: int) -> dict[str, np.ndarray]:
        """The rows that all shards sent to a partition; at least one shard."""
        table = read_partition([self.path(job, shard) for shard in self.numbering.shards], partition)
        return {name: table[name].to_numpy() for name in table.column_names}

    def reply(self, job: str, partition: str, rows: dict[str, np.ndarray], shards: np.ndarray) -> Path:
        """Write a partition's rows for the shards that they answer."""
        path = self.path(job, partition)
        write_partitions(path, _table(rows), shards, len(self.numbering.shards))
        return path

    def replies(self, job: str, shard: int) -> dict[str, np.ndarray]:
        """The rows that all partitions answered to a shard, by their hash."""
        table = read_partition([self.path(job, task.name) for task in self.partitions()], shard)
        order = np.argsort(table["hash"].to_numpy(), kind="stable")
        return {name: table[name].to_numpy()[order] for name in table.column_names}


def find_hashes(sorted_hashes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The places of hashes among sorted distinct ones: int64, -1 where one is not there."""
    if not len(sorted_hashes):
        return np.full(len(wanted), -1, np.int64)
    places = np.minimum(np.searchsorted(sorted_hashes, wanted), len(sorted_hashes) - 1)
    found: np.ndarray = np.where(sorted_hashes[places] == wanted, places, -1)
    return found


def _table(rows: dict[str, np.ndarray]) -> pa.Table:
    return pa.table({name: pa.array(values) for name, values in rows.items()})
