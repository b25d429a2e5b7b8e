"""The section `dedup_substrings`: long passages that stand in the corpus more than once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.section import Fraction, Judging


class DedupSubstrings(Judging):
    """Exact substrings of many words (Lee et al. 2022, "Deduplicating training data makes language models better").

    Two passages are the same if all their bytes are. They begin and end at words: lower-cased runs of letters, digits
    and underscores, or single characters of scripts without spaces.
    """

    min_words: Annotated[int, Field(ge=2)] = 50
    """Shortest repeated passage that is cut. Lee et al. cut from 50 tokens on, which are some 40 English words."""
    certain_words: Annotated[int, Field(ge=2)] = 75
    """Repeated passages of so many words are found for certain; shorter ones only by chance.

    The closer to `min_words`, the more is moved between shards: about one hash per
    `(certain_words - min_words + 2) / 2` words of text. Where both are equal every passage is found.
    """
    action: Literal["cut", "drop"] = "cut"
    """Cut every copy but the first (in the document with the smallest id, a hash), or drop documents by their share."""
    max_duplicated_substring_ratio: Fraction = 1.0
    """Documents of whose words a larger share is in copies are dropped; with `cut` so are those left empty."""

    @model_validator(mode="after")
    def _consistent(self) -> DedupSubstrings:
        if self.certain_words < self.min_words:
            raise ValueError(
                f"certain_words ({self.certain_words}) must be at least min_words ({self.min_words}); raise it"
            )
        if self.action == "drop" and self.max_duplicated_substring_ratio == 1.0:
            raise ValueError(
                "with action `drop` nothing happens unless max_duplicated_substring_ratio is below 1; set it"
            )
        return self

    @property
    def edits_text(self) -> bool:
        """Whether the stage changes texts, beside keeping or dropping them."""
        return self.action == "cut"
