"""Document shards, and whole stages that run over them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, write_table
from gristmill.mixtures.base import RawSection
from gristmill.mixtures.schema.engine import BeamEngine

Run = Callable[[Any, Any, Path, Context], Any]
"""The function `run` of a stage."""


class StageRun(NamedTuple):
    """A finished run of a stage.

    Attributes:
        out: its output.
        summary: as the stage returned it.
    """

    out: Path
    summary: Any


def shard_name(shard: int) -> str:
    """Return the file name of a document shard."""
    return f"part-{shard:05d}.parquet"


def write_shard(
    folder: Path,
    shard: int,
    texts: Sequence[str],
    metadata: Sequence[str] | None = None,
) -> None:
    """Write a shard of documents of one source; their locators are SHARD/ROW."""
    locators = [f"{shard}/{number}" for number in range(len(texts))]
    ids = [
        document_id("web", locator, text)
        for locator, text in zip(locators, texts, strict=True)
    ]
    columns = {
        "id": pa.array(ids, DOCUMENT_SCHEMA.field("id").type),
        "source": ["web"] * len(texts),
        "locator": locators,
        "text": texts,
        "metadata": metadata or ["{}"] * len(texts),
    }
    write_table(folder / shard_name(shard), pa.table(columns).cast(DOCUMENT_SCHEMA))


def stage_runs(
    run: Run, inputs: Mapping[str, Path], config: RawSection, folder: Path
) -> Callable[[], StageRun]:
    """Return a function that runs a whole stage, each time into folders of its own
    below `folder`.

    What this process has loaded for the stage stays loaded.
    """
    numbers = itertools.count()

    def call() -> StageRun:
        place = folder / f"run-{next(numbers)}"
        (place / "work").mkdir(parents=True)
        context = Context(
            work=place / "work",
            stage="bench",
            beam=BeamEngine(mode="memory"),
            emit=lambda event: None,
        )
        return StageRun(place / "out", run(inputs, config, place / "out", context))

    return call
