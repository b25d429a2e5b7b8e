"""The documents of a run as a table that is read when it is asked for, in the forms of other libraries."""

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
    """Documents with everything that was said of them, as a `pyarrow.dataset.Dataset`: nothing is read before its time.

    Its columns are `id`, `source`, `locator`, `url`, `licence`, `text` (edited), `metadata`, `kept`, `dropped_by`,
    `reason`, `error`, and whatever the steps measured, under the names that expressions use. What asks for some
    columns reads these alone, shard by shard, in the order of the corpus.
    """

    _conditions: tuple[Any, ...] = ()

    def filter(self, expression: Any) -> Documents:
        """The documents that meet a `pyarrow.dataset` expression, too.

        Args:
            expression: such as `pyarrow.dataset.field("words") > 100`.
        """
        return _opened(
            type(self), self.corpus, self.schema.names, self.kept, self.where, (*self._conditions, expression)
        )

    def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> Any:
        """A reading of some columns (all if absent) of the documents that meet an expression (all if absent)."""
        return super().scanner(columns, self._all_of(filter), **options)

    def count_rows(self, filter: Any = None, **options: Any) -> int:
        """How many documents there are."""
        return super().count_rows(self._all_of(filter), **options)

    def to_duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """A relation of DuckDB, which reads the columns that a query names: `.filter("words > 100").df()`.

        Args:
            connection: an open one; a new one in memory if absent.
        """
        import duckdb

        return (connection or duckdb.connect()).from_arrow(self)

    def to_pandas(self) -> pandas.DataFrame:
        """All documents in memory, as a DataFrame with Arrow's types.

        Raises:
            MissingLibraryError: pandas is not installed.
        """
        found = _library("pandas")
        return self.to_table().to_pandas(types_mapper=found.ArrowDtype)

    def to_polars(self) -> polars.LazyFrame:
        """A LazyFrame, which reads the columns that are collected.

        Raises:
            MissingLibraryError: Polars is not installed.
        """
        return _library("polars").scan_pyarrow_dataset(self)

    def to_hf(self) -> datasets.IterableDataset:
        """A `datasets.IterableDataset`, which reads the documents while it is iterated.

        Raises:
            MissingLibraryError: datasets is not installed.
        """
        found = _library("datasets")
        return found.IterableDataset.from_generator(
            _examples, gen_kwargs={"documents": self}, features=found.Features.from_arrow_schema(self.schema)
        )

    def _all_of(self, expression: Any) -> Any:
        found = [one for one in (*self._conditions, expression) if one is not None]
        return reduce(and_, found) if found else None

    def __repr__(self) -> str:
        kept = {True: "kept", False: "dropped", None: "kept and dropped"}[self.kept]
        return f"Documents({kept}: {', '.join(self.schema.names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (type(self), self.corpus, self.schema.names, self.kept, self.where, self._conditions)


def _opened(
    kind: type[Documents],
    corpus: Any,
    columns: list[str],
    kept: bool | None,
    where: str | None,
    conditions: tuple[Any, ...],
) -> Documents:
    made = kind.of(corpus, columns, kept, where)
    made._conditions = conditions
    return made


def _examples(documents: Documents) -> Iterator[dict[str, Any]]:
    for batch in documents.to_batches():
        yield from batch.to_pylist()


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingLibraryError(
            f"{name} is not installed; install it with: pip install 'gristmill[{EXTRA_OF[name]}]'"
        ) from error
