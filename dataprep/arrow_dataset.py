"""Documents as a pyarrow dataset, which DuckDB, Polars and others read column by
column.

Separate from `corpus.py`, since importing `pyarrow.dataset` imports pandas: half a
second that few commands need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.dataset

from gristmill.dataprep.corpus import Corpus

BATCH_ROWS = 1000


class CorpusDataset(pyarrow.dataset.InMemoryDataset):
    """Documents as a pyarrow dataset that reads only the requested columns.

    DuckDB, Polars and pyarrow's own methods all read through `scanner`.
    """

    corpus: Corpus
    kept: bool | None
    where: str | None

    @classmethod
    def of(
        cls,
        corpus: Corpus,
        columns: Sequence[str] | None = None,
        kept: bool | None = True,
        where: str | None = None,
    ) -> Self:
        """Dataset of some columns of the selected documents; see `Corpus.read`.

        Raises:
            UnknownColumnError: a column does not exist.
        """
        corpus.check(columns)
        names = corpus.columns if columns is None else columns
        dataset = cls(
            pa.schema([corpus.schema.field(name) for name in names]).empty_table()
        )
        dataset.corpus = corpus
        dataset.kept = kept
        dataset.where = where
        return dataset

    def scanner(
        self,
        columns: Sequence[str] | Mapping[str, object] | None = None,
        filter: Any = None,
        **options: Any,
    ) -> CorpusScan | pyarrow.dataset.Scanner:
        """Scan some columns (all if None) of the documents that match a pyarrow
        expression (all if None).

        Tuning options of pyarrow's scanner (`options`) have no effect. Computed columns
        go through pyarrow's scanner.
        """
        scan = CorpusScan(self, self.schema.names, filter)
        if isinstance(columns, Mapping):
            return pyarrow.dataset.Scanner.from_batches(
                scan.to_reader(), columns=columns
            )
        return scan if columns is None else CorpusScan(self, list(columns), filter)

    def count_rows(self, filter: Any = None, **options: Any) -> int:
        """Number of documents."""
        if filter is None:
            return self.corpus.count_rows(self.kept, self.where)
        return sum(
            len(batch)
            for batch in CorpusScan(self, [self.schema.names[0]], filter).to_batches()
        )


@dataclass(frozen=True)
class CorpusScan:
    """One scan of a `CorpusDataset`, in document order, with the reading methods of
    pyarrow's `Scanner`.
    """

    dataset: CorpusDataset
    columns: Sequence[str]
    filter: Any = None

    @property
    def projected_schema(self) -> pa.Schema:
        """Schema of the result."""
        return pa.schema([self.dataset.schema.field(name) for name in self.columns])

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the documents in batches."""
        corpus = self.dataset.corpus
        kept = self.dataset.kept
        where = self.dataset.where
        # pyarrow does not list the columns of an expression; columns named in its text
        # are a superset.
        filter_text = "" if self.filter is None else str(self.filter)
        filtered = [
            name
            for name in self.dataset.schema.names
            if name not in self.columns
            and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", filter_text)
        ]
        for shard in corpus.shards:
            table = corpus.read(shard, [*self.columns, *filtered], kept, where)
            if self.filter is not None:
                table = table.filter(self.filter).select(self.columns)
            yield from table.to_batches(max_chunksize=BATCH_ROWS)

    def to_reader(self) -> pa.RecordBatchReader:
        """Documents as a record batch reader."""
        return pa.RecordBatchReader.from_batches(
            self.projected_schema, self.to_batches()
        )

    def to_table(self) -> pa.Table:
        """All documents as one table."""
        return pa.Table.from_batches(self.to_batches(), self.projected_schema)

    def head(self, num_rows: int) -> pa.Table:
        """First `num_rows` documents."""
        batches: list[pa.RecordBatch] = []
        for batch in self.to_batches():
            batches.append(batch)
            if sum(map(len, batches)) >= num_rows:
                break
        return pa.Table.from_batches(batches, self.projected_schema).slice(0, num_rows)

    def count_rows(self) -> int:
        """Number of documents."""
        return self.dataset.count_rows(self.filter)
