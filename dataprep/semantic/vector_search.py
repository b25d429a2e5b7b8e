"""Search for the documents nearest to a text in meaning, by the vectors that a stage
has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.core.files import is_local
from gristmill.dataprep.documents import open_table
from gristmill.dataprep.semantic.embedding_store import unpack_vectors

ROWS_AT_ONCE = 8_192
"""Vectors that are read at a time: with 384 elements 6 MB as stored, and 12 MB more
while they are compared.
"""
LEAST_COSINE = 0.0
"""Cosine that a listed document exceeds; a text without known tokens has cosine 0 with
every document.
"""


@dataclass(frozen=True)
class Near:
    """Near document: its shard, its id, and its cosine with the text."""

    shard: str
    id: bytes
    cosine: float


def nearest(
    folder: Path, shards: Sequence[str], vector: np.ndarray, most: int
) -> tuple[list[Near], int]:
    """Find the documents with the largest cosines, sorted by descending cosine and id,
    and count all vectors.

    The search is exhaustive: it reads all files, ROWS_AT_ONCE vectors at a time, and
    keeps the `most` nearest so far.

    Args:
        folder: folder `vectors` with a file per shard: `id` and `vector`.
        shards: names of the shards.
        vector: vector of the text, float32 of shape (dim,) and length 1.
        most: maximum number of documents.
    """
    best: list[Near] = []
    num_vectors = 0
    least = LEAST_COSINE
    for shard in shards:
        with open_table(folder / shard) as file:
            for batch in file.iter_batches(
                ROWS_AT_ONCE, columns=["id", "vector"], use_threads=is_local(folder)
            ):
                num_vectors += len(batch)
                cosines = unpack_vectors(batch["vector"]).astype(np.float32) @ vector
                rows = np.flatnonzero((cosines > LEAST_COSINE) & (cosines >= least))
                rows = rows[np.argsort(-cosines[rows], kind="stable")[:most]]
                ids = batch["id"].take(rows).to_pylist()
                best += [
                    Near(shard, id_, float(cosine))
                    for id_, cosine in zip(ids, cosines[rows], strict=True)
                ]
                best = sorted(
                    best, key=lambda document: (-document.cosine, document.id)
                )[:most]
                least = best[-1].cosine if len(best) == most else LEAST_COSINE
    return best, num_vectors
