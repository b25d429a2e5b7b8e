"""Clusters of vectors: k-means by scikit-learn on a sample, and the nearest centroid of
each vector.
"""

from __future__ import annotations

import math

import numpy as np

from gristmill.core.seeds import seeded_key
from gristmill.dataprep.encoders.model_folders import needed

DOCUMENTS_PER_CLUSTER = 1_000
"""Documents per cluster by default, up to a million documents. Beyond, the number of
clusters is the square root of the number of documents, which balances comparisons
within clusters and with centroids.
"""
SAMPLE_PER_CLUSTER = 256
"""Sampled vectors per centroid, the limit of FAISS (`max_points_per_centroid`)."""
SAMPLE_BYTES = 256_000_000
"""Maximum size of a sample's vectors; k-means holds two copies of them."""
FIRST_BATCH = 4_096
MOST_ROUNDS = 100
ROWS_AT_ONCE = 4_096
"""Vectors that are compared with all centroids at a time."""


def count_clusters(documents: int) -> int:
    """Default number of clusters for this many documents; a function of the data
    alone.
    """
    return max(1, min(documents // DOCUMENTS_PER_CLUSTER, math.isqrt(documents)))


def count_sample(clusters: int, dim: int) -> int:
    """Number of vectors to learn this many centroids from."""
    return max(clusters, min(SAMPLE_PER_CLUSTER * clusters, SAMPLE_BYTES // (4 * dim)))


def draw(ids: np.ndarray, seed: int, number: int, documents: int) -> np.ndarray:
    """Draw a sample of about `number` of all `documents`: a mask (bool) of n documents.

    Args:
        ids: uint64 of shape (n,), the first 8 bytes of each id, which is a hash.
    """
    if number >= documents:
        return np.ones(len(ids), bool)
    key = np.uint64(seeded_key(seed, "sample of k-means") | 1)
    return ids * key < np.uint64(2**64 * number // documents)


def fit_centroids(vectors: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """Learn centroids of length 1: float32 of shape (k, dim), k <= clusters.

    One thread computes them, so that the same vectors in the same order give the same
    bytes.

    Raises:
        gristmill.dataprep.encoders.model_folders.ModelFolderError: scikit-learn is not
            installed.
    """
    distinct = np.unique(vectors, axis=0)
    if min(clusters, len(distinct)) < 2:
        return np.zeros((1, vectors.shape[1]), np.float32)
    cluster = needed("sklearn.cluster")
    limits = needed("threadpoolctl")
    kmeans = cluster.MiniBatchKMeans(
        min(clusters, len(distinct)),
        batch_size=FIRST_BATCH,
        max_iter=MOST_ROUNDS,
        n_init=1,
        random_state=seed % 2**32,
    )
    with limits.threadpool_limits(1):
        centres: np.ndarray = kmeans.fit(vectors.astype(np.float32)).cluster_centers_
    lengths = np.linalg.norm(centres, axis=1, keepdims=True)
    return (centres / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def nearest_centroids(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Centroid with the largest cosine for each of n vectors: int32 of shape (n,)."""
    nearest = np.zeros(len(vectors), np.int32)
    for begin in range(0, len(vectors), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        nearest[rows] = np.argmax(
            vectors[rows].astype(np.float32) @ centroids.T, axis=1
        )
    return nearest
