"""The sections `dedup_semantic` and `cluster`: documents that say the same in other words, or are about the same."""

from __future__ import annotations

from gristmill.mixtures.base import Fraction, Judging, Positive
from gristmill.mixtures.encoder_settings import ReadingModel


class DedupSemantic(Judging):
    """Duplicates in meaning (SemDeDup, Abbas et al. 2023); of documents that are alike one survives. See
    docs/meaning.md."""

    model: ReadingModel
    """The sentence embeddings that documents are compared by; a path alone names the folder."""
    threshold: Fraction = 0.9
    """Least cosine of a document with the survivor that it is dropped for, both rounded to thousandths. It depends on
    the model and on the length of the texts: look at the pairs in `gristmill browse` before a corpus is cut by it."""
    clusters: Positive | None = None
    """Clusters of k-means; documents are compared within one only. If absent, as many as there are thousands of
    documents, and from a million documents on the square root of their number."""
    keep: tuple[str, ...] = ("length desc", "source", "id")
    """Which member survives, as of `dedup`: columns in order, each with an optional `desc`."""
    seed: int = 1
    """Seed of the sample that k-means learns from, and of its first centroids."""


class Cluster(Judging):
    """Numbers and names documents by what they are about, for `where`. See docs/meaning.md."""

    model: ReadingModel
    """The sentence embeddings that documents are compared by; a path alone names the folder."""
    k: Positive = 64
    """Clusters of k-means at the most."""
    seed: int = 1
    """Seed of the sample that k-means learns from, and of its first centroids."""
