"""The sections `dedup`, `dedup_lines` and `dedup_substrings`: repetitions in the
corpus, and which copies stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gristmill.mixtures.base import (
    Count,
    Fraction,
    Judging,
    OutsidePath,
    Positive,
    Section,
    Several,
)
from gristmill.mixtures.schema.encoder_settings import ReadingModel


class MinHash(Section):
    """Near-duplicate detection (Broder 1997; banding as in Leskovec et al., chapter
    3).
    """

    ngram: Positive = 5
    """Words per shingle."""
    bands: Positive = 14
    """Groups of permutations; pairs that agree in all permutations of a group are
    compared.
    """
    rows: Positive = 8
    """Permutations per band; there are bands x rows permutations."""
    threshold: Fraction = 0.75
    """Smallest true Jaccard similarity of duplicates that share a band (used with
    `verify`).
    """
    verify: bool = True
    """Compute the true Jaccard similarity of every candidate pair."""
    seed: int = 1
    """Seed of datasketch's permutations."""


class Dedup(Judging):
    """Exact and near duplicates, and copies of one page; one of several similar
    documents survives.
    """

    added = ("meaning",)
    exact: bool = True
    """Treat documents of equal text as duplicates."""
    url: bool = False
    """Treat documents with the same normalised URL as duplicates, whatever their texts
    (`urls.normalise_url`). A document's URL is the string `url` of its metadata, or its
    locator if that begins with http(s)://; otherwise it has none.
    """
    minhash: MinHash | None = MinHash()
    """Treat documents that are nearly equal as duplicates; `null` disables this."""
    clusters: Literal["connected", "survivors"] = "survivors"
    """Choice of the documents to drop in a cluster. `survivors`: only those that are
    themselves similar enough to a kept document. The best (`keep`) is kept and
    documents similar to it are dropped, then the best of the others, and so on.
    `connected` (single linkage, as in datatrove and NeMo Curator): all but one, so that
    a chain of texts, each similar to the next, is one document; those not similar to
    the survivor have the reason `chained_duplicate`.

    `survivors` is the default by precision: of the labelled revisions that it drops
    (`gristmill bench quality`) all are similar to the kept one, of those that
    `connected` drops 94 %; and neither keeps more than 0.6 % of the pairs that are
    similar. The report shows how many documents each rule drops.
    """
    keep: tuple[str, ...] = ("length desc", "source", "id")
    """Order that chooses the survivor: columns in order, each with an optional
    `desc`.
    """
    against: tuple[OutsidePath, ...] = ()
    """Earlier outputs of this stage (their folders in a store, or copies of these):
    documents kept there are never dropped here, and documents here that are duplicates
    of one of them always are. Their indexes must have been written with the same
    `minhash` (ngram, bands, rows, seed), and with `url` if that is set.
    """
    index: bool = True
    """Write the index that a later run needs to name this output in its `against`:
    about 3.5 bytes per word and 170 per kept document, or 60 % of the size of plain
    English text.
    """
    meaning: ReadingModel | None = None
    """Model of sentence embeddings that compares the meanings of a sample of the
    duplicates with those of their survivors, for the report; it drops nothing.
    """


class DedupLines(Judging):
    """Distinct lines across the corpus, each kept in one document (Raffel et al. 2020,
    section 2.2, the C4 data set).
    """

    unit: Literal["line", "paragraph"] = "line"
    """Unit of comparison: lines, or paragraphs (text between runs of two or more
    newlines).
    """
    normalise: Literal["strip", "strip_lower"] = "strip_lower"
    """`strip` compares without white space at both ends; `strip_lower` ignores case as
    well, as C4 does.
    """
    min_words: Count = 5
    """Units with fewer words (`str.split`) are never cut, so that code and verse keep
    theirs.

    C4 drops lines of fewer than 5 words before it searches for duplicates
    (`_MIN_WORDS_PER_LINE` in c4_utils.py).
    """
    min_characters: Count = 0
    """Units with fewer code points are never cut; for scripts without spaces, with
    `min_words: 1`.
    """
    min_documents: Several = 2
    """Number of documents with a unit from which it counts as repeated; raise it to
    remove only boilerplate.
    """
    action: Literal["keep_one", "cut_all"] = "keep_one"
    """Treatment of a repeated unit: the document with the smallest id (a hash) keeps
    it, or no document does.
    """
    within_documents: bool = True
    """Cut later copies inside one document too, however many documents have the
    unit.
    """
    max_removed_line_ratio: Fraction = 1.0
    """Documents that lose a larger share of the code points of their units are dropped,
    as are those left empty.
    """

    @property
    def edits_text(self) -> bool:
        """True if the stage changes texts besides keeping or dropping them."""
        return True


class DedupSubstrings(Judging):
    """Exact substrings of many words (Lee et al. 2022, "Deduplicating training data
    makes language models better").

    Two passages are equal if all their bytes are. They begin and end at words:
    lower-cased runs of letters, digits and underscores, or single characters of scripts
    without spaces.
    """

    min_words: Several = 50
    """Shortest repeated passage to cut. Lee et al. cut from 50 tokens on, which are
    some 40 English words.
    """
    certain_words: Several = 75
    """Length in words from which repeated passages are always found; shorter ones are
    found only by chance.

    The closer to `min_words`, the more is sent between shards: about one hash per
    `(certain_words - min_words + 2) / 2` words of text. If both are equal, every
    passage is found.
    """
    action: Literal["cut", "drop"] = "cut"
    """Cut every copy but the first (in the document with the smallest id, a hash), or
    drop documents by their share.
    """
    max_duplicated_substring_ratio: Fraction = 1.0
    """Documents with a larger share of their words in copies are dropped; with `cut`,
    so are those left empty.
    """

    def _problems(self) -> Iterator[str]:
        if self.certain_words < self.min_words:
            yield (
                f"certain_words ({self.certain_words}) must be at least min_words "
                f"({self.min_words}); raise it"
            )
        if self.action == "drop" and self.max_duplicated_substring_ratio == 1.0:
            yield (
                "action `drop` has no effect unless "
                "max_duplicated_substring_ratio is below 1; set it"
            )

    @property
    def edits_text(self) -> bool:
        """True if the stage changes texts besides keeping or dropping them."""
        return self.action == "cut"
