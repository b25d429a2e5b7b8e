"""Memory of tasks that read documents by a model: one shard, for any number of
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dataprep.stage_runs import write_shard
from gristmill.core.stage_context import Context
from gristmill.dataprep.dedup import semantic as dedup_semantic
from gristmill.dataprep.encoders import score_documents
from gristmill.dataprep.semantic import cluster
from gristmill.dataprep.user_code import annotate
from gristmill.mixtures.schema.engine import BeamEngine
from tests.dataprep.small_models import random_texts, write_word_vectors
from tests.tokenize.test_mix_memory import peak_bytes

pytestmark = pytest.mark.slow
DOCUMENTS = 3_000
"""Documents of a shard; a vector of 16 numbers has 32 bytes."""


def peaks(
    monkeypatch: pytest.MonkeyPatch,
    stage: Any,
    config: dict[str, Any],
    folder: Path,
    shards: int,
    documents: int = DOCUMENTS,
    jobs_in: Any = None,
) -> dict[str, int]:
    """Peak bytes of the first task of each job of a stage; the jobs run in `jobs_in`,
    by default the stage.
    """
    for number in range(shards):
        write_shard(folder / "ingest", number, random_texts(documents, number))
    tasks = dict[str, Callable[[], Any]]()

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            job: str, job_tasks: Any, process: Any, *arguments: Any, **options: Any
        ) -> Any:
            tasks.setdefault(job, lambda: process(job_tasks[0]))
            return original(job, job_tasks, process, *arguments, **options)

        return run

    with monkeypatch.context() as patch:
        for name in ("run_tasks", "run_shuffle"):
            if hasattr(jobs_in or stage, name):
                patch.setattr(
                    jobs_in or stage, name, recorded(getattr(jobs_in or stage, name))
                )
        (folder / "work").mkdir()
        context = Context(
            work=folder / "work",
            beam=BeamEngine(mode="memory"),
            emit=lambda event: None,
        )
        stage.run({"ingest": folder / "ingest"}, config, folder / "out", context)

    def exhausting(work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            result = work()
            for _ in result if isinstance(result, Generator) else ():
                pass

        return run

    return {job: peak_bytes(exhausting(work)) for job, work in tasks.items()}


@pytest.mark.parametrize(
    ("stage", "settings", "jobs"),
    [
        (
            dedup_semantic,
            {"threshold": 0.99, "clusters": 4},
            ("embed", "members", "apply"),
        ),
        (cluster, {"k": 4}, ("embed", "apply")),
    ],
)
def test_embedding_memory_does_not_grow_with_the_shards(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: Any,
    settings: dict[str, Any],
    jobs: tuple[str, ...],
) -> None:
    config = {"model": str(write_word_vectors(tmp_path / "model")), **settings}
    two, eight = (
        peaks(monkeypatch, stage, config, tmp_path / str(shards), shards)
        for shards in (2, 8)
    )
    for job in jobs:
        assert eight[job] < 1.1 * two[job], job


def test_annotate_memory_grows_only_by_the_shards_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "model": {
            "path": str(write_word_vectors(tmp_path / "model")),
            "like": {"near": "w1 w2"},
        }
    }
    few, many = (
        peaks(
            monkeypatch,
            annotate,
            config,
            tmp_path / str(number),
            1,
            number,
            score_documents,
        )["annotate"]
        for number in (3_000, 12_000)
    )
    texts = sum(len(text) for text in random_texts(12_000, 0)) - sum(
        len(text) for text in random_texts(3_000, 0)
    )
    assert many - few < 3 * texts + 200 * 9_000
