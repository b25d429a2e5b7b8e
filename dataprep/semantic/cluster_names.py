"""Names of clusters, and their places on a two-dimensional map."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gristmill.dataprep.encoders.model_folders import needed

WORD = re.compile(r"[^\W\d_]{3,}")
WORDS_OF_A_NAME = 4


def name_clusters(texts: Sequence[str], clusters: np.ndarray, number: int) -> list[str]:
    """Name each of `number` clusters by its most typical words, joined with spaces;
    `empty` for an empty cluster.

    A word counts once per document. Its weight in a cluster is p log(p / q), with p the
    share of the cluster's documents that contain it and q the share of all documents:
    its term of the divergence between the two (Kullback and Leibler 1951). Words of all
    documents, such as `the`, have weight 0.

    Args:
        texts: texts of n documents.
        clusters: int of shape (n,), the cluster of each.
    """
    counted = [Counter[str]() for _ in range(number)]
    for text, cluster in zip(texts, clusters.tolist(), strict=True):
        counted[cluster].update(set(WORD.findall(text.lower())))
    everywhere = sum(counted, Counter[str]())
    sizes = np.bincount(clusters, minlength=number).tolist()
    names = []
    for words, size in zip(counted, sizes, strict=True):
        weighted = []
        for word, count in words.items():
            share = count / size
            divergence = share * float(np.log(share * len(texts) / everywhere[word]))
            weighted.append((-round(divergence, 9), -count, word))
        best = " ".join(word for *_, word in sorted(weighted)[:WORDS_OF_A_NAME])
        names.append(best or ("no words" if size else "empty"))
    return names


def project(
    vectors: np.ndarray, clusters: np.ndarray, number: int, most: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Project `number` clusters and the first `most` of n vectors onto the first two
    principal components, by scikit-learn.

    The place of a cluster is the mean of its vectors, not its centroid: a centroid has
    length 1 and would lie outside of its vectors, whose mean is shorter. A cluster
    without vectors is in the middle of the map.

    Args:
        clusters: int of shape (n,), the cluster of each vector.
    """
    if len(vectors) < 2 or vectors.shape[1] < 2:
        return [(0.0, 0.0)] * number, [(0.0, 0.0)] * min(len(vectors), most)
    pca = needed("sklearn.decomposition").PCA(2, svd_solver="covariance_eigh")
    # one thread, so that the same vectors in the same order give the same bytes
    with needed("threadpoolctl").threadpool_limits(1), np.errstate(invalid="ignore"):
        flat = pca.fit_transform(vectors.astype(np.float32))
    sizes = np.maximum(np.bincount(clusters, minlength=number), 1)
    middles = (
        np.stack(
            [np.bincount(clusters, flat[:, axis], number) for axis in range(2)], axis=1
        )
        / sizes[:, None]
    )

    def rounded(places: np.ndarray) -> list[tuple[float, float]]:
        return [(round(float(x), 3), round(float(y), 3)) for x, y in places]

    return rounded(middles), rounded(flat[:most])
