"""fastText models of random numbers in fastText's file format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HIERARCHICAL, NEGATIVE_SAMPLING, SOFTMAX, ONE_VS_ALL = 1, 2, 3, 4


@dataclass(frozen=True)
class Shape:
    """Shape of a model; fields are fastText's options."""

    loss: int = SOFTMAX
    dim: int = 16
    labels: int = 5
    minn: int = 2
    maxn: int = 4
    word_ngrams: int = 1
    bucket: int = 500
    quantised: bool = False
    qnorm: bool = False
    qout: bool = False
    dsub: int = 2
    kept: int | None = None
    """Buckets that a pruned model keeps."""
    scale: float = 1.0


def write_model(path: Path, shape: Shape, words: Sequence[str], seed: int) -> Path:
    """Write a model of the given words, the most frequent first, and labels
    `__label__0` and so on.
    """
    rng = np.random.default_rng(seed)
    kept = np.full((0, 2), -1, np.int32)
    if shape.kept is not None:
        buckets = rng.permutation(shape.bucket)[: shape.kept]
        kept = np.stack([buckets, rng.permutation(shape.kept)], axis=1).astype("<i4")
    entries = [
        *((word, 2, 0) for word in words),
        *(
            (f"__label__{number}", 1 + (shape.labels - number) ** 3, 1)
            for number in range(shape.labels)
        ),
    ]
    rows = len(words) + (shape.bucket if shape.kept is None else shape.kept)
    with path.open("wb") as sink:
        sink.write(struct.pack("<2i", 793712314, 12))
        sink.write(
            struct.pack(
                "<12id",
                shape.dim,
                5,
                5,
                1,
                5,
                shape.word_ngrams,
                shape.loss,
                3,
                shape.bucket,
                shape.minn,
                shape.maxn,
                100,
                1e-4,
            )
        )
        pruned = -1 if shape.kept is None else len(kept)
        sink.write(
            struct.pack("<3i2q", len(entries), len(words), shape.labels, 1000, pruned)
        )
        for word, count, kind in entries:
            sink.write(word.encode() + b"\0" + struct.pack("<qb", count, kind))
        sink.write(kept.tobytes())
        sink.write(struct.pack("?", shape.quantised))
        sink.write(_matrix(rng, rows, shape, shape.quantised))
        sink.write(struct.pack("?", shape.qout))
        sink.write(_matrix(rng, shape.labels, shape, shape.quantised and shape.qout))
    return path


def write_classifier(folder: Path, words: Sequence[str]) -> dict[str, str]:
    """Write a model of two labels, and return the classifier's section that uses it."""
    path = write_model(folder / "random.bin", Shape(labels=2), words, seed=1)
    return {"model": str(path), "label": "__label__0"}


def _matrix(
    rng: np.random.Generator, rows: int, shape: Shape, quantised: bool
) -> bytes:
    if not quantised:
        numbers = (shape.scale * rng.standard_normal((rows, shape.dim))).astype("<f4")
        return struct.pack("<2q", rows, shape.dim) + numbers.tobytes()
    groups = -(-shape.dim // shape.dsub)
    codes = rng.integers(0, 256, (rows, groups), np.uint8)
    content = (
        struct.pack("<?2qi", shape.qnorm, rows, shape.dim, codes.size) + codes.tobytes()
    )
    content += _quantiser(rng, shape.dim, groups, shape.dsub, shape.scale)
    if shape.qnorm:
        content += rng.integers(0, 256, rows, np.uint8).tobytes() + _quantiser(
            rng, 1, 1, 1, 1.0
        )
    return content


def _quantiser(
    rng: np.random.Generator, dim: int, groups: int, dsub: int, scale: float
) -> bytes:
    centroids = (scale * rng.standard_normal(dim * 256)).astype("<f4")
    return (
        struct.pack("<4i", dim, groups, dsub, dim % dsub or dsub) + centroids.tobytes()
    )
