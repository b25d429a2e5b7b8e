"""`gristmill query`: SQL over one view, `documents`, with every column of every
document of a run.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.core.files import atomic_write
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.where_sql import CONFINED
from gristmill.flows.pages.page_elements import Fields, Heading, Table
from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.running.terminal import plain_console

VIEW = "documents"
MEMORY = "1GB"
"""Memory limit of DuckDB, which then spills to its temporary folder."""
THREADS = 2
OUTSIDE = "enable_external_access"
BATCH_ROWS = 1000
SHOWN_ROWS = 40
SHOWN_CHARS = 300
"""Characters of a value shown in a table."""
LEAST_WIDTH = 8
"""Minimum width of a column; narrower tables print each row as lines."""


class QueryError(ValueError):
    """The SQL cannot be answered."""


@dataclass(frozen=True)
class Answer:
    """Lazily computed result of a query.

    Attributes:
        columns: names of the columns.
    """

    columns: Sequence[str]
    _connection: Any
    _sql: str

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows; integers of any size are int."""
        for batch in self._batches():
            columns = []
            for column in batch.columns:
                values = column.to_pylist()
                if pa.types.is_decimal(column.type):
                    kind = float if column.type.scale else int
                    values = [
                        value if value is None else kind(value) for value in values
                    ]
                columns.append(values)
            yield from zip(*columns, strict=True)

    def table(self) -> pa.Table:
        """Return all rows."""
        return self._batches().read_all()

    def _batches(self) -> Any:
        # Not `execute`, which holds all rows in memory.
        return self._connection.sql(self._sql).to_arrow_reader(BATCH_ROWS)

    def write_parquet(self, path: Path) -> int:
        """Write the rows to a file atomically and return their number."""
        import pyarrow.parquet as pq

        rows = 0
        reader = self._batches()
        with (
            atomic_write(path) as sink,
            pq.ParquetWriter(sink, reader.schema, compression="zstd") as writer,
        ):
            for batch in reader:
                writer.write_batch(batch)
                rows += len(batch)
        return rows


@contextmanager
def ask(corpus: Corpus, sql: str) -> Iterator[Answer]:
    """Answer one SELECT, which can read only the documents: no file, no network, no
    extension.

    Only the columns that it names are read, shard by shard; data beyond MEMORY spills
    to a temporary folder.

    Raises:
        QueryError: the SQL is not one SELECT, or DuckDB refuses it, also while its rows
            are read within the block.
    """
    import duckdb

    from gristmill.dataprep.arrow_dataset import CorpusDataset

    with tempfile.TemporaryDirectory(prefix="gristmill-query-") as folder:
        config = {name: value for name, value in CONFINED.items() if name != OUTSIDE}
        connection = duckdb.connect(
            config={**config, "threads": THREADS, "memory_limit": MEMORY}
        )
        try:
            # The temporary folder can be set only while external access is enabled.
            connection.execute(f"SET temp_directory = '{folder}'")
            connection.execute(f"SET {OUTSIDE} = false")
            connection.register(
                VIEW, CorpusDataset.of(corpus, corpus.schema.names, kept=None)
            )
            connection.execute("SET lock_configuration = true")
            statements = connection.extract_statements(sql)
            if [statement.type.name for statement in statements] != ["SELECT"]:
                raise QueryError(
                    "give one SELECT over the view `documents`, for example: SELECT "
                    "source, count(*) FROM documents WHERE kept GROUP BY source"
                )
            yield Answer(connection.sql(sql).columns, connection, sql)
        except duckdb.Error as error:
            raise QueryError(str(error).strip().replace("\n\n", "\n")) from error
        finally:
            connection.unregister(VIEW)
            connection.close()


def print_rows(answer: Answer) -> None:
    """Print the first rows as a table that fits the terminal, or as lines if there are
    too many columns.
    """
    all_rows = answer.rows()
    rows = list(itertools.islice(all_rows, SHOWN_ROWS))
    hidden_rows = sum(1 for _ in all_rows)
    cells = [list(map(shown, row)) for row in rows]
    if len(answer.columns) * (LEAST_WIDTH + 2) > plain_console().width:
        for number, row_cells in enumerate(cells, 1):
            fields = Fields(list(zip(answer.columns, row_cells, strict=True)))
            print_parts(Heading(f"row {number}"), fields)
    else:
        numeric = [
            index
            for index, values in enumerate(zip(*rows, strict=True))
            if {type(value) for value in values} <= {int, float, type(None)}
        ]
        print_parts(Table(answer.columns, cells, numeric))
    more = (
        f"and {hidden_rows:,} more rows; --csv, --json and --out FILE.parquet give all"
    )
    print_parts(more if hidden_rows else None, None if rows else "no rows")


def shown(value: Any) -> str:
    """Format a value for a cell: one line, cut if long."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} ..."
