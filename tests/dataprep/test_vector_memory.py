"""Memory of tasks with vectors, as stated in docs/meaning.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.dedup.clusters import parse_keep
from gristmill.dataprep.dedup.semantic import decide_cluster
from gristmill.dataprep.dedup.survivors import KEEP_PREFIX
from gristmill.dataprep.semantic import vector_search as search
from gristmill.dataprep.semantic.centroids import fit_centroids, nearest_centroids
from gristmill.dataprep.semantic.cluster_names import project
from gristmill.dataprep.semantic.embedding_store import pack_vectors
from tests.tokenize.test_mix_memory import peak_bytes

pytestmark = pytest.mark.slow
NUMBER, DIM = 40_000, 64
COSINES = 200_000_000
"""Bytes that a comparison takes, for any number of documents."""


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    drawn = np.random.default_rng(3).normal(size=(NUMBER, DIM)).astype(np.float32)
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float16)


def test_cluster_memory_is_two_copies_and_500_bytes_per_document(
    vectors: np.ndarray,
) -> None:
    ids = np.random.default_rng(4).bytes(16 * NUMBER)
    locators = pa.array(
        [f"web/part-{number % 7}.jsonl#{number}" for number in range(NUMBER)]
    )
    members = pa.table(
        {
            f"{KEEP_PREFIX}id": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), NUMBER, [None, pa.py_buffer(ids)]
            ),
            f"{KEEP_PREFIX}length": np.arange(NUMBER) % 900,
            "document": np.arange(NUMBER),
            "centroid": np.zeros(NUMBER, np.int32),
            "locator": locators,
            "vector": pack_vectors(vectors),
        }
    )
    keys = parse_keep(("length desc", "id"))
    peak = peak_bytes(lambda: decide_cluster(members, keys, 0.9))
    assert peak < 2 * vectors.nbytes + 500 * NUMBER + COSINES


def test_centroid_memory_is_two_float32_samples(vectors: np.ndarray) -> None:
    sample = vectors[:20_000]
    peak = peak_bytes(lambda: fit_centroids(sample, 32, 1))
    assert peak < 2 * 4 * sample.size + 20_000_000


def test_map_memory_is_two_float32_samples(vectors: np.ndarray) -> None:
    sample = vectors[:20_000]
    assignment = nearest_centroids(sample, sample[:32].astype(np.float32))
    peak = peak_bytes(lambda: project(sample, assignment, 32, 1000))
    assert peak < 2 * 4 * sample.size + 20_000_000


def test_search_memory_does_not_grow_with_the_vectors(
    vectors: np.ndarray, tmp_path: Path
) -> None:
    ids = pa.array(
        [number.to_bytes(16, "big") for number in range(NUMBER)], pa.binary(16)
    )
    table = pa.table({"id": ids, "vector": pack_vectors(vectors)})
    for name, times in (("one.parquet", 1), ("four.parquet", 4)):
        pq.write_table(
            pa.concat_tables([table] * times), tmp_path / name, row_group_size=2_000
        )
    query = vectors[0].astype(np.float32)
    peak_of_one, peak_of_four = (
        peak_bytes(lambda name=name: search.nearest(tmp_path, [name], query, 200))
        for name in ("one.parquet", "four.parquet")
    )
    assert peak_of_four < 1.2 * peak_of_one
    assert peak_of_one < 12 * DIM * search.ROWS_AT_ONCE + 4_000_000
