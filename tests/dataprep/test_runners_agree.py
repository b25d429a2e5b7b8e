"""Every runner, mode and store gives the same bytes."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.files import as_path
from gristmill.core.stage_context import Context
from gristmill.dataprep.dedup import dedup
from gristmill.dataprep.filters import filter
from gristmill.dataprep.readers import ingest
from gristmill.mixtures.schema.engine import BeamEngine
from tests.dataprep.dask_processes import Cluster

WORDS = "the of and to in a mill grinds grain into flour while water turns the heavy wheel beside it again".split()
PORTABLE = {"job_endpoint": "embed", "environment_type": "LOOPBACK"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five files of two sources: documents that rules drop, exact and near duplicates,
    broken records.
    """
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(7)
    texts = [
        " ".join(rng.choices(WORDS, k=(20, 120, 200)[number % 3]))
        for number in range(40)
    ]
    texts += [texts[4], texts[5] + " and so on", texts[11].replace("mill", "Mill", 1)]
    for number in range(5):
        lines = [json.dumps({"text": text}) for text in texts[number::5]] + [
            "{broken"
        ] * (number == 4)
        (folder / f"{'ab'[number % 2]}-{number}.jsonl").write_text(
            "\n".join(lines) + "\n"
        )
    return folder


def prepare(
    corpus: Path, folder: Path, **engine: Any
) -> tuple[dict[str, str], list[Any]]:
    """Ingest, filter and deduplicate; return the SHA-256 of each output file, and the
    summaries.
    """
    sources = {name: {"path": str(corpus / f"{name}-*.jsonl")} for name in "ab"}
    steps = [
        (
            ingest,
            {
                "sources": sources,
                "ingest": {"shard_bytes": 4000, "max_quarantined": 0.5},
            },
        ),
        (filter, {"rules": {"gopher_quality": {"min_words": 50}}}),
        (dedup, {}),
    ]
    inputs: dict[str, Path] = {}
    summaries = []
    for module, config in steps:
        name = module.__name__.rpartition(".")[2]
        context = Context(
            folder / "work" / name,
            name,
            BeamEngine(**{"workers": 1, **engine}),
            emit=lambda event: None,
        )
        summaries.append(module.run(dict(inputs), config, folder / name, context))
        inputs[name] = folder / name
    files = [
        path for out in inputs.values() for path in out.rglob("*") if path.is_file()
    ]
    prefix = len(str(folder)) + 1
    return {
        str(path)[prefix:]: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }, summaries


@pytest.fixture(scope="module")
def expected(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], list[Any]]:
    """Files and summaries of one worker."""
    files, summaries = prepare(corpus, tmp_path_factory.mktemp("expected"), workers=1)
    assert [summary.counts["kept"] for summary in summaries] == [43, 29, 26]
    assert summaries[2].clusters == 3
    return files, summaries


@pytest.mark.parametrize(
    "engine",
    [
        {"workers": 2, "mode": "memory"},
        {"workers": 3, "mode": "threads"},
        {"workers": 1, "mode": "processes"},
        pytest.param(
            {"workers": 2, "runner": "PortableRunner", "options": PORTABLE},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["memory", "threads", "processes", "portable"],
)
def test_modes_and_the_portable_runner_give_the_same_bytes(
    corpus: Path,
    expected: tuple[dict[str, str], list[Any]],
    tmp_path: Path,
    engine: dict[str, Any],
) -> None:
    assert prepare(corpus, tmp_path, **engine) == expected


@pytest.mark.slow
def test_dask_cluster_gives_the_same_bytes(
    corpus: Path,
    expected: tuple[dict[str, str], list[Any]],
    tmp_path: Path,
    cluster: Cluster,
) -> None:
    assert prepare(corpus, tmp_path, runner="dask", address=cluster.address) == expected


@pytest.mark.slow
def test_object_store_gives_the_same_bytes(
    corpus: Path, expected: tuple[dict[str, str], list[Any]]
) -> None:
    """Tables, records and shuffle partitions all go through the store's own reads and
    writes.
    """
    folder = as_path("memory://runners-agree")
    try:
        assert prepare(corpus, folder, workers=2) == expected
    finally:
        folder.fs.rm("/runners-agree", recursive=True)  # type: ignore[attr-defined]
