"""The sections `dedup_semantic` and `cluster`: documents with the same meaning, or
about the same subject.
"""

from __future__ import annotations

from gristmill.mixtures.base import Fraction, Judging, Positive
from gristmill.mixtures.schema.encoder_settings import ReadingModel


class DedupSemantic(Judging):
    """Duplicates in meaning (SemDeDup, Abbas et al. 2023); one of several similar
    documents survives. See docs/meaning.md.
    """

    model: ReadingModel
    """Model of sentence embeddings by which documents are compared; a path alone names
    its folder.
    """
    threshold: Fraction = 0.9
    """Smallest cosine with a survivor at which a document is dropped, both rounded to
    thousandths. It depends on the model and on the length of the texts: check the pairs
    in `gristmill browse` before you deduplicate a corpus with it.
    """
    clusters: Positive | None = None
    """Number of k-means clusters; documents are compared only within one. If absent,
    one per thousand documents, and from a million documents on the square root of their
    number.
    """
    keep: tuple[str, ...] = ("length desc", "source", "id")
    """Order that chooses the survivor, as in `dedup`: columns in order, each with an
    optional `desc`.
    """
    seed: int = 1
    """Seed of the sample from which k-means learns, and of its first centroids."""


class Cluster(Judging):
    """Numbers and names of documents by subject, for `where`. See docs/meaning.md."""

    model: ReadingModel
    """Model of sentence embeddings by which documents are compared; a path alone names
    its folder.
    """
    k: Positive = 64
    """Largest number of k-means clusters."""
    seed: int = 1
    """Seed of the sample from which k-means learns, and of its first centroids."""
