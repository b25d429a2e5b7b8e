"""Documents as numbers 0, 1, 2, ... within one job, and the size of their text.

The numbers depend on the shards and therefore never reach the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.core.files import at_once, is_local
from gristmill.dataprep.documents import open_table, shard_names, stored_text_bytes


@dataclass(frozen=True)
class Numbering:
    """Numbering of documents by shard.

    Attributes:
        shards: names of the document shards, in order: those of this run, then those of
            older corpora.
        starts: int64 of shape (shards + 1,); shard i has the documents from starts[i]
            up to starts[i + 1].
        num_new_shards: number of shards of this run.
    """

    shards: Sequence[str]
    starts: np.ndarray
    num_new_shards: int

    @property
    def num_new(self) -> int:
        """Number of documents of this run; larger numbers belong to older corpora."""
        return int(self.starts[self.num_new_shards])

    def shards_of(self, documents: np.ndarray) -> np.ndarray:
        """Shard of each document: int64, positions in `shards`."""
        return np.searchsorted(self.starts, documents, side="right") - 1

    def split(self, documents: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Split ascending document numbers into (shard, row numbers), for every shard
        with documents.
        """
        ends = np.searchsorted(documents, self.starts)
        return [
            (shard, documents[ends[shard] : ends[shard + 1]] - self.starts[shard])
            for shard in range(len(self.shards))
            if ends[shard] < ends[shard + 1]
        ]


def number_documents(ingest: Path) -> Numbering:
    """Number the documents of a committed ingest."""
    return number_rows([ingest / shard for shard in shard_names(ingest)])


def number_rows(new: Sequence[Path], old: Sequence[tuple[str, Path]] = ()) -> Numbering:
    """Number the rows of Parquet files.

    Args:
        new: document shards of this run.
        old: index files of older corpora, each with its name in this run.
    """
    sizes = count_rows([*new, *(path for _, path in old)])
    names = [*(path.name for path in new), *(name for name, _ in old)]
    return Numbering(
        names,
        offsets_of(sizes),
        len(new),
    )


def count_rows(paths: Sequence[Path]) -> list[int]:
    """Number of rows of each Parquet file; files of a store are read concurrently."""

    def num_rows(path: Path) -> int:
        with open_table(path) as file:
            return int(file.metadata.num_rows)

    return list(at_once(num_rows, paths, all(map(is_local, paths))))


def text_bytes(ingest: Path) -> int:
    """Bytes of the text of a committed ingest before compression (with Parquet's small
    overhead).
    """

    def size(path: Path) -> int:
        with open_table(path) as file:
            return stored_text_bytes(file)

    paths = [ingest / shard for shard in shard_names(ingest)]
    return sum(at_once(size, paths, is_local(ingest)))
