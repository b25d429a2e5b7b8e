"""A whole chain whose workers share only a store with the driver, on two hosts without
gristmill.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.engines.recipe import write_corpus
from benchmarks.public_data import language_model
from benchmarks.store_servers import object_store
from gristmill.core.files import sha256_file
from gristmill.dataprep.runners.errors import MissingEngineError
from tests.commands import GRISTMILL, finished
from tests.dataprep.small_models import write_word_vectors
from tests.strangers import BUCKET, CLUSTERS, machines

pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(language_model() is None, reason="lid.176.ftz is missing"),
]
RUN = (*GRISTMILL, "run")
TRAINING = """
pretrain: {model: {layers: 1, width: 32, heads: 2}, steps: 6, global_batch_size: 4, micro_batch_size: 4, log_every: 1}
"""
SEND = """
import fsspec, sys
store = fsspec.filesystem("s3")
for name in ("web", "books"):
    store.put(f"{sys.argv[1]}/{name}", f"{sys.argv[2]}/{name}", recursive=True)
"""
FETCH = (
    "import fsspec, sys; fsspec.filesystem('s3').get(sys.argv[1], sys.argv[2], "
    "recursive=True)"
)
AWAIT = """
import fsspec, sys, time
store = fsspec.filesystem("s3", use_listings_cache=False)
for _ in range(1500):
    if store.glob(sys.argv[1]):
        sys.exit()
    time.sleep(0.2)
sys.exit(f"there is no {sys.argv[1]} after 300 s")
"""
STAGES = (
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
    "annotate-2",
    "tokenizer",
    "tokenize",
    "mix",
    "pretrain",
)
LAST = {"dask": "pretrain", "spark": "ingest"}
"""Last stage of each engine: Spark starts five processes for each stage."""
MODEL = "  - annotate: {model: {path: ./model, like: {prose: w1 w2}}}\n"
"""Stages that use a model whose folder only the driver has."""
DRIVER = """
import sys
from gristmill.core import heartbeats, lease
heartbeats.STALE_SECONDS, heartbeats.BEAT_SECONDS, lease.WAIT_SECONDS = 3.0, 0.5, 0.1
host = sys.argv.pop(1)
lease._pid_namespace = lambda: host
sys.argv[0] = "gristmill"
from gristmill.flows.cli.main import main
main()
"""
"""A driver on a host that sees no processes of other hosts, with leases of three
seconds.
"""
TIMED = "metrics.jsonl"
"""File with the time of each step beside its loss."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of the engine tests: its sources go to the store, all else stays on
    the driver's disk.
    """
    manifest = write_corpus(tmp_path_factory.mktemp("project"))
    text = manifest.read_text()
    text = text.replace("web/*.warc.gz", f"s3://{BUCKET}/web/*.warc.gz")
    text = text.replace("books/*.jsonl", f"s3://{BUCKET}/books/*.jsonl")
    manifest.write_text(text.replace("tokenizer:", f"{MODEL}tokenizer:", 1) + TRAINING)
    write_word_vectors(manifest.parent / "model")
    return manifest


@pytest.fixture(scope="module")
def expected(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checksums of the output of one machine in a folder."""
    store = tmp_path_factory.mktemp("here")
    with object_store(BUCKET) as server:
        environment = {**os.environ, **server.environment()}
        for command in (
            (sys.executable, "-c", SEND, str(project.parent), BUCKET),
            (*RUN, str(project), "--no-ui", "--store", str(store)),
        ):
            finished(command, env=environment)
    checksums = sums(store)
    assert {name.partition("/")[0] for name in checksums} == set(STAGES)
    return checksums


def sums(store: Path) -> dict[str, str]:
    """Return the SHA-256 of each file; for a training, that of its losses."""
    files = [path for path in sorted(store.glob("*/*/data/**/*")) if path.is_file()]
    return {
        str(path.relative_to(store)): str(losses(path))
        if path.name == TIMED
        else sha256_file(path)
        for path in files
    }


def losses(path: Path) -> list[float]:
    loss_values = [
        line["loss"]
        for line in map(json.loads, path.read_text().splitlines())
        if "loss" in line
    ]
    assert len(loss_values) == 6
    return loss_values


@pytest.mark.parametrize("name", LAST)
def test_workers_sharing_only_a_store_write_the_bytes_of_one_machine(
    name: str, project: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """On Dask the driver is also killed, and restarted on a host that sees nothing of
    the first one.
    """
    try:
        with machines(tmp_path, hidden=project.parent) as cluster:
            cluster.run(sys.executable, "-c", SEND, str(project.parent), BUCKET)
            arguments = (
                "run",
                str(project),
                "--no-ui",
                "--until",
                LAST[name],
                "--store",
                f"s3://{BUCKET}/store",
                "--set",
                f"engine={CLUSTERS[name](cluster)}",
            )
            if name == "dask":
                first = cluster.lead(sys.executable, "-c", DRIVER, "one", *arguments)
                cluster.run(
                    sys.executable, "-c", AWAIT, f"{BUCKET}/store/dedup/*/work/*/*.json"
                )
                first.kill()
                output = cluster.run(
                    sys.executable, "-c", DRIVER, "another", *arguments
                )
                assert "waiting for another run" in " ".join(output.split())
            else:
                cluster.run(*GRISTMILL, *arguments)
            cluster.run(
                sys.executable,
                "-c",
                FETCH,
                f"{BUCKET}/store",
                str(cluster.folder / "there"),
            )
    except MissingEngineError as error:
        pytest.skip(str(error))
    stages = STAGES[: STAGES.index(LAST[name]) + 1]
    assert sums(cluster.folder / "there") == {
        file: checksum
        for file, checksum in expected.items()
        if file.partition("/")[0] in stages
    }
