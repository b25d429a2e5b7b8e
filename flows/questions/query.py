"""`gristmill query`: SQL over one view, `documents`, with every column of every document of a run."""

from __future__ import annotations

import csv
import io
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.core.files import atomic_write
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.where_sql import CONFINED
from gristmill.flows.running.terminal import plain_console, visible

VIEW = "documents"
MEMORY = "1GB"
"""What DuckDB holds before it writes to its temporary folder."""
THREADS = 2
OUTSIDE = "enable_external_access"
BATCH_ROWS = 1000
SHOWN_ROWS = 40
SHOWN_CHARS = 300
"""Of a value in a table."""
LEAST_WIDTH = 8
"""Characters of a column below which a row is shown as lines of its own."""


class QueryError(ValueError):
    """SQL that cannot be answered."""


@dataclass(frozen=True)
class Answer:
    """What a query gives, computed when it is asked for.

    Attributes:
        columns: their names.
    """

    columns: Sequence[str]
    _connection: Any
    _sql: str

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows, one by one; whole numbers of any size are int."""
        for batch in self._batches():
            yield from zip(*(_values(column) for column in batch.columns), strict=True)

    def _batches(self) -> Any:
        # Not by `execute`, which holds all rows.
        return self._connection.sql(self._sql).to_arrow_reader(BATCH_ROWS)

    def write_parquet(self, path: Path) -> int:
        """Write the rows to a file, whole or not at all; returns how many there are."""
        import pyarrow.parquet as pq

        rows = 0
        reader = self._batches()
        with atomic_write(path) as sink, pq.ParquetWriter(sink, reader.schema, compression="zstd") as writer:
            for batch in reader:
                writer.write_batch(batch)
                rows += len(batch)
        return rows


@contextmanager
def ask(corpus: Corpus, sql: str) -> Iterator[Answer]:
    """Answer one SELECT. It sees the documents and nothing else: no file, no network, no extension.

    Only the columns that it names are read, shard by shard; what does not fit into MEMORY goes to a temporary folder.

    Raises:
        QueryError: it is not one SELECT, or DuckDB refuses it, also while its rows are read within the block.
    """
    import duckdb

    from gristmill.dataprep.arrow_dataset import CorpusDataset

    with tempfile.TemporaryDirectory(prefix="gristmill-query-") as folder:
        others = {name: value for name, value in CONFINED.items() if name != OUTSIDE}
        connection = duckdb.connect(config={**others, "threads": THREADS, "memory_limit": MEMORY})
        try:
            # The folder can be named only as long as others can be reached.
            connection.execute(f"SET temp_directory = '{folder}'")
            connection.execute(f"SET {OUTSIDE} = false")
            connection.register(VIEW, CorpusDataset.of(corpus, corpus.schema.names, kept=None))
            connection.execute("SET lock_configuration = true")
            statements = connection.extract_statements(sql)
            if [one.type.name for one in statements] != ["SELECT"]:
                raise QueryError(
                    "give one SELECT over the view `documents`, for example: SELECT source, count(*) FROM "
                    "documents WHERE kept GROUP BY source"
                )
            yield Answer(connection.sql(sql).columns, connection, sql)
        except duckdb.Error as error:
            raise QueryError(_said(error)) from error
        finally:
            connection.unregister(VIEW)
            connection.close()


def _values(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    if not pa.types.is_decimal(column.type):
        return values
    whole = int if column.type.scale == 0 else float
    return [None if value is None else whole(value) for value in values]


def _said(error: Exception) -> str:
    return str(error).strip().replace("\n\n", "\n")


def print_answer(answer: Answer) -> None:
    """Print the first rows as a table that fits the terminal; rows with too many columns for it as lines."""
    console = plain_console()
    rows: list[tuple[Any, ...]] = []
    more = 0
    for row in answer.rows():
        if len(rows) < SHOWN_ROWS:
            rows.append(row)
        else:
            more += 1
    _print_rows(console, answer.columns, rows)
    if more:
        console.print(Text(f"and {more:,} more rows; --csv, --json and --out FILE.parquet give all", style="dim"))
    if not rows:
        console.print(Text("no rows", style="dim"))


def _print_rows(console: Console, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    if len(columns) * (LEAST_WIDTH + 2) > console.width:
        widest = max(map(len, columns))
        for number, row in enumerate(rows, 1):
            console.print(Text(f"row {number}", style="bold"))
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(min_width=min(widest, console.width // 3), overflow="fold")
            grid.add_column(overflow="fold")
            for name, value in zip(columns, row, strict=True):
                grid.add_row(Text(name, style="dim"), Text(shown(value)))
            console.print(grid)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        numeric = bool(rows) and all(
            isinstance(row[place], int | float) and not isinstance(row[place], bool)
            for row in rows
            if row[place] is not None
        )
        table.add_column(visible(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(value)) for value in row))
    console.print(table)


def shown(value: Any) -> str:
    """A value in a cell: on one line, without control characters, cut where it is long."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = visible(" ".join(str(value).split()))
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} ..."


def csv_lines(answer: Answer) -> Iterator[str]:
    """The rows as CSV (RFC 4180, but lines end as those of shells do), the names first."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    for row in itertools.chain([tuple(answer.columns)], answer.rows()):
        writer.writerow(row)
        yield sink.getvalue()
        sink.seek(0)
        sink.truncate()
