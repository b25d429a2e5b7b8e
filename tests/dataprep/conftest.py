"""Fixtures that the tests of dataprep share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, write_table
from tests.dataprep.dask_processes import Cluster

Documents = Sequence[tuple[str, str, str]]
"""(source, locator, text) of each document."""


@pytest.fixture
def write_ingest(tmp_path: Path) -> Callable[[str, Sequence[Documents]], Path]:
    """Write document shards below `tmp_path`: (name of the folder, documents of each shard) -> the folder."""

    def write(name: str, shards: Sequence[Documents]) -> Path:
        for number, documents in enumerate(shards):
            rows = [
                {
                    "id": document_id(*document),
                    "source": document[0],
                    "locator": document[1],
                    "text": document[2],
                    "metadata": "{}",
                }
                for document in documents
            ]
            table = pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA)
            write_table(tmp_path / name / f"part-{number:05d}.parquet", table)
        return tmp_path / name

    return write


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., Context]:
    """Make a silent context: (name of the work folder, **fields of Context) -> Context."""

    def make(name: str, **fields: object) -> Context:
        work = tmp_path / name
        work.mkdir(parents=True, exist_ok=True)
        return Context(work=work, emit=lambda event: None, **fields)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Dask scheduler and two workers; skips the test where Dask is not installed."""
    pytest.importorskip("distributed")
    dask_cluster = Cluster(tmp_path_factory.mktemp("dask"))
    try:
        dask_cluster.add_worker()
        dask_cluster.add_worker()
        yield dask_cluster
    finally:
        dask_cluster.close()
