"""Documents of a run as a lazily read table, with conversions to other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from operator import and_
from typing import TYPE_CHECKING, Any

from gristmill.dataprep.arrow_dataset import CorpusDataset
from gristmill.flows.running.missing_libraries import EXTRA_OF, MissingLibraryError

if TYPE_CHECKING:
    import datasets
    import duckdb
    import pandas
    import polars


class Documents(CorpusDataset):
    """Documents with all their measurements and verdicts, as a lazily read
    `pyarrow.dataset.Dataset`.

    Its columns are `id`, `source`, `locator`, `url`, `licence`, `text` (edited),
    `metadata`, `kept`, `dropped_by`, `reason`, `error`, and all measurements of the
    steps, under the names that expressions use. Only requested columns are read, shard
    by shard, in corpus order.
    """

    _conditions: tuple[Any, ...] = ()

    def filter(self, expression: Any) -> Documents:
        """Restrict to documents that also meet a `pyarrow.dataset` expression.

        Args:
            expression: such as `pyarrow.dataset.field("words") > 100`.
        """
        return _open_documents(
            type(self),
            self.corpus,
            self.schema.names,
            self.kept,
            self.where,
            (*self._conditions, expression),
        )

    def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> Any:
        """Scan some columns (None means all) of the documents that meet an expression
        (None means all).
        """
        return super().scanner(columns, self._all_of(filter), **options)

    def count_rows(self, filter: Any = None, **options: Any) -> int:
        """Count the documents."""
        return super().count_rows(self._all_of(filter), **options)

    def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None
    ) -> duckdb.DuckDBPyRelation:
        """Return a DuckDB relation, which reads only the columns that a query names:
        `.filter("words > 100").df()`.

        Args:
            connection: an open connection; None opens one in memory.
        """
        import duckdb

        return (connection or duckdb.connect()).from_arrow(self)

    def to_pandas(self) -> pandas.DataFrame:
        """Load all documents into a DataFrame with Arrow types.

        Raises:
            MissingLibraryError: pandas is not installed.
        """
        pandas_module = _import_library("pandas")
        return self.to_table().to_pandas(types_mapper=pandas_module.ArrowDtype)

    def to_polars(self) -> polars.LazyFrame:
        """Return a Polars LazyFrame, which reads only the collected columns.

        Raises:
            MissingLibraryError: Polars is not installed.
        """
        return _import_library("polars").scan_pyarrow_dataset(self)

    def to_hf(self) -> datasets.IterableDataset:
        """Return a `datasets.IterableDataset`, which reads documents while it is
        iterated.

        Raises:
            MissingLibraryError: datasets is not installed.
        """
        datasets_module = _import_library("datasets")
        return datasets_module.IterableDataset.from_generator(
            _examples,
            gen_kwargs={"documents": self},
            features=datasets_module.Features.from_arrow_schema(self.schema),
        )

    def _all_of(self, expression: Any) -> Any:
        conditions = [
            condition
            for condition in (*self._conditions, expression)
            if condition is not None
        ]
        return reduce(and_, conditions) if conditions else None

    def __repr__(self) -> str:
        kept = {True: "kept", False: "dropped", None: "kept and dropped"}[self.kept]
        return f"Documents({kept}: {', '.join(self.schema.names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_documents, (
            type(self),
            self.corpus,
            self.schema.names,
            self.kept,
            self.where,
            self._conditions,
        )


def _open_documents(
    kind: type[Documents],
    corpus: Any,
    columns: list[str],
    kept: bool | None,
    where: str | None,
    conditions: tuple[Any, ...],
) -> Documents:
    documents = kind.of(corpus, columns, kept, where)
    documents._conditions = conditions
    return documents


def _examples(documents: Documents) -> Iterator[dict[str, Any]]:
    for batch in documents.to_batches():
        yield from batch.to_pylist()


def _import_library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingLibraryError(
            f"{name} is not installed; install it with: pip install "
            f"'gristmill[{EXTRA_OF[name]}]'"
        ) from error
