"""The section `dedup`: which documents count as duplicates, and which of them survives."""

from __future__ import annotations

from gristmill.mixtures.section import Fraction, Judging, Positive, Section


class MinHash(Section):
    """Near-duplicate detection (Broder 1997; banding as in Leskovec et al., chapter 3)."""

    ngram: Positive = 5
    """Words per shingle."""
    bands: Positive = 14
    rows: Positive = 8
    """Permutations per band; bands x rows permutations in all."""
    threshold: Fraction = 0.75
    """Least true Jaccard similarity of a pair that shares a band (used when `verify`)."""
    verify: bool = True
    """Compute the true Jaccard similarity of every candidate pair."""
    seed: int = 1
    """Seed of datasketch's permutations."""


class Dedup(Judging):
    """Exact and near duplicates; one document of each cluster survives."""

    exact: bool = True
    minhash: MinHash | None = MinHash()
    keep: tuple[str, ...] = ("length desc", "source", "id")
    """Which member survives: columns in order, each with an optional `desc`."""
