"""The section `dedup`: which documents count as duplicates, and which of them survive."""

from __future__ import annotations

from typing import Literal

from gristmill.mixtures.section import Fraction, Judging, OutsidePath, Positive, Section


class MinHash(Section):
    """Near-duplicate detection (Broder 1997; banding as in Leskovec et al., chapter 3)."""

    ngram: Positive = 5
    """Words per shingle."""
    bands: Positive = 14
    """Groups of permutations; pairs that agree in all of one are compared."""
    rows: Positive = 8
    """Permutations per band; bands x rows permutations in all."""
    threshold: Fraction = 0.75
    """Least true Jaccard similarity of a pair that shares a band (used when `verify`)."""
    verify: bool = True
    """Compute the true Jaccard similarity of every candidate pair."""
    seed: int = 1
    """Seed of datasketch's permutations."""


class Dedup(Judging):
    """Exact and near duplicates, and copies of one page; of documents that are alike one survives."""

    exact: bool = True
    """Documents of equal text are duplicates."""
    url: bool = False
    """Documents of one normalised URL are duplicates, whatever their texts (`urls.normalise_url`). A document's URL
    is the string `url` of its metadata, else its locator if that begins with http(s)://; without one it has none."""
    minhash: MinHash | None = MinHash()
    """Documents that are nearly equal are duplicates; `null` switches this off."""
    clusters: Literal["connected", "survivors"] = "survivors"
    """Who goes of documents that are joined by likeness, directly or through others. `survivors`: only what is itself
    alike enough to a document that is kept: the best (`keep`) is kept and what is like it goes, then the best of what
    is left, and so on. `connected` (single linkage, as in datatrove and NeMo Curator): all but one, so that a chain of
    texts, each like the next, is one document; those unlike the survivor have the reason `chained_duplicate`."""
    keep: tuple[str, ...] = ("length desc", "source", "id")
    """Which member survives: columns in order, each with an optional `desc`."""
    against: tuple[OutsidePath, ...] = ()
    """Earlier outputs of this stage (their folders in a store, or copies of these): documents that they kept are
    never dropped here, and documents here that are duplicates of one of them always are. Their indexes must have been
    made with the same `minhash` (ngram, bands, rows, seed), and with `url` where that is asked for."""
    index: bool = True
    """Write the index that a later run needs to name this output in its `against`: about 3.5 bytes per word and 170 per
    document that is kept, or 60 % of the size of plain English text."""
