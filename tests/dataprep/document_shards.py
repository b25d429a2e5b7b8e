"""Document shards, annotation tables and the files of an output folder; jobs that run
in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    document_id,
    read_documents,
    write_table,
)
from gristmill.dataprep.runners import shuffle
from gristmill.dataprep.runners.tasks import Task, finish_task

Document = tuple[str, str, str]
"""(source, locator, text)"""
WriteIngest = Callable[[str, Sequence[Sequence[Document]]], Path]
MakeContext = Callable[..., Context]
"""Fixtures `write_ingest` and `make_context`."""


def write_shards(folder: Path, shards: Sequence[Sequence[Document]]) -> Path:
    """Write `part-00000.parquet` and so on, and return the folder."""
    for number, documents in enumerate(shards):
        rows = []
        for document in documents:
            source, locator, text = document
            row = {
                "id": document_id(*document),
                "source": source,
                "locator": locator,
                "text": text,
                "metadata": "{}",
            }
            rows.append(row)
        write_table(
            folder / f"part-{number:05d}.parquet",
            pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA),
        )
    return folder


def rewrite_texts(shard: Path, texts: Sequence[bytes]) -> None:
    """Replace the texts of a shard by bytes that need not be UTF-8."""
    table = pq.read_table(shard)
    column = table.schema.get_field_index("text")
    array = pa.array(texts, pa.large_binary()).view(pa.large_string())
    write_table(shard, table.set_column(column, table.schema.field("text"), array))


def rows_by_id(folder: Path) -> dict[bytes, dict[str, Any]]:
    """Annotation rows of a stage."""
    rows = {}
    for path in sorted(folder.glob("part-*.parquet")):
        rows |= {row["id"]: row for row in pq.read_table(path).to_pylist()}
    return rows


def texts_by_locator(inputs: Mapping[str, Path]) -> dict[str, str]:
    """Texts of all documents after the edits of the stages of `inputs`."""
    texts: dict[str, str] = {}
    for path in sorted(inputs["ingest"].glob("part-*.parquet")):
        documents = read_documents(inputs, path.name)
        texts |= zip(
            documents["locator"].to_pylist(), documents["text"].to_pylist(), strict=True
        )
    return texts


def file_contents(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@contextmanager
def jobs_in_this_process(stage: ModuleType) -> Iterator[None]:
    """Run the tasks of a stage's jobs one after another, without Beam."""

    def run_in_turn(
        job: str,
        tasks: Sequence[Task],
        process: Any,
        context: Context,
        *_: Any,
        **__: Any,
    ) -> list[Any]:
        (context.work / job).mkdir(parents=True, exist_ok=True)
        return [finish_task(task, process, context.work / job) for task in tasks]

    with pytest.MonkeyPatch.context() as patch:
        for module in (stage, shuffle):
            patch.setattr(module, "run_tasks", run_in_turn)
        yield
