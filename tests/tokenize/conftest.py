"""Small committed stages to run the tokenizing ones on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gristmill.dataprep.context import Context
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, write_table

Document = tuple[str, str]
"""Source and text."""


def write_ingest(folder: Path, documents: Sequence[Document], shards: int = 1) -> Path:
    """A committed ingest, the documents dealt out to its shards in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        rows = documents[shard::shards]
        table = pa.table({
            "id": [document_id(source, f"{source}:{hash_free_number(text)}", text) for source, text in rows],
            "source": pa.array([source for source, _ in rows], pa.string()).dictionary_encode(),
            "locator": [f"{source}:{hash_free_number(text)}" for source, text in rows],
            "text": pa.array([text for _, text in rows], pa.large_string()),
            "metadata": ["{}"] * len(rows),
        }, schema=DOCUMENT_SCHEMA)
        write_table(folder / f"part-{shard:05d}.parquet", table)
    return folder


def hash_free_number(text: str) -> int:
    """A locator that depends on the text alone, so that another shard layout has the same ids."""
    return sum(text.encode())


def write_annotations(folder: Path, ingest: Path, columns: Any) -> Path:
    """One annotating stage; `columns(table)` gives name -> values for a document shard."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(ingest.glob("part-*.parquet")):
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        made = {"keep": [True] * len(table), **columns(table)}
        made.setdefault("reason", [None if keep else "rule" for keep in made["keep"]])
        arrays = {"id": table["id"].combine_chunks(), "error": pa.nulls(len(table), pa.string()), **made}
        arrays["reason"] = pa.array(arrays["reason"], pa.string()).dictionary_encode()
        write_table(folder / path.name, pa.table(arrays))
    return folder


def make_context(folder: Path, workers: int = 1) -> Context:
    """Where a stage runs; its events are kept in `folder/events.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)

    def emit(event: dict[str, Any]) -> None:
        with (folder / "events.jsonl").open("a") as sink:
            sink.write(json.dumps(event) + "\n")

    return Context(work=folder / "work", workers=workers, emit=emit)


def warnings_of(folder: Path) -> list[str]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["message"] for event in events if event["event"] == "warning"]


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of an output folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the checkout."""
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    if not folder.exists():
        pytest.skip("no real data beside the checkout")
    return folder
