"""Every engine prepares, tokenizes and mixes one corpus to the same bytes, even if a
worker is killed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engines.clusters import PATIENCE_SECONDS, running
from benchmarks.engines.recipe import run_stages, write_corpus
from benchmarks.public_data import language_model
from gristmill.dataprep.runners import cluster_retry, tasks
from gristmill.dataprep.runners.errors import MissingEngineError
from gristmill.tokenize.encoding import vocabulary_sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(language_model() is None, reason="lid.176.ftz is missing"),
]
STAGES = [
    "ingest",
    "clean",
    "langid",
    "filter",
    "dedup",
    "dedup_lines",
    "dedup_substrings",
    "quality",
    "decontaminate",
    "annotate",
    "tokenizer",
    "tokenize",
    "mix",
]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def expected(
    manifest: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Output of the local runner with one worker."""
    stages: list[str] = []
    files = run_stages(
        manifest, tmp_path_factory.mktemp("local"), stages.append, workers=1
    )
    assert stages == STAGES
    return files


@pytest.mark.parametrize(
    ("name", "shuffle"),
    [
        ("ray-host", "engine"),
        ("dask", "engine"),
        ("spark", "engine"),
        ("spark-host", None),
        ("flink-external", "engine"),
    ],
)
def test_every_engine_writes_equal_bytes_even_if_a_worker_is_killed(
    name: str,
    shuffle: str | None,
    manifest: Path,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the engine's shuffle, all jobs are the engine's, too. Its workers, shared by
    all stages here, prove only once that they see the store.
    """
    if shuffle == "engine":
        monkeypatch.setattr(tasks, "FEW_DOCUMENTS", 0)
        monkeypatch.setattr(vocabulary_sample, "LITTLE_TEXT", 0)
    meet_workers = cluster_retry.meet_workers
    monkeypatch.setattr(
        cluster_retry,
        "meet_workers",
        lambda context: meet_workers(replace(context, work=tmp_path / "probe")),
    )
    kill_file = manifest.with_name("kill")

    def kill_one(stage: str) -> None:
        if stage == "annotate":
            kill_file.touch()

    try:
        with running(name, tmp_path) as cluster:
            # starts a worker for each job in each slot; the bench has a job in both
            if name == "flink-external":
                cluster.engine["options"]["parallelism"] = 1
            assert (
                run_stages(
                    manifest,
                    tmp_path,
                    kill_one,
                    **cluster.engine,
                    worker_seconds=PATIENCE_SECONDS,
                    shuffle=shuffle,
                )
                == expected
            )
    except MissingEngineError as error:
        pytest.skip(str(error))
    assert not kill_file.exists()  # removed by the killed worker
