"""The section `dedup_lines`: lines or paragraphs that the corpus has more than once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.section import Fraction, Judging

NotNegative = Annotated[int, Field(ge=0)]


class DedupLines(Judging):
    """Each distinct line stays in one document of the corpus (Raffel et al. 2020, section 2.2, the C4 data set)."""

    unit: Literal["line", "paragraph"] = "line"
    """What is compared: lines, or paragraphs (what lies between runs of two newlines or more)."""
    normalise: Literal["strip", "strip_lower"] = "strip_lower"
    """`strip` compares without white space at both ends; `strip_lower` ignores case as well, as C4 does."""
    min_words: NotNegative = 5
    """Units with fewer words (`str.split`) are left alone, so that code and verse keep theirs.

    C4 drops lines of fewer than 5 words before it looks for duplicates (`_MIN_WORDS_PER_LINE` in c4_utils.py).
    """
    min_characters: NotNegative = 0
    """Units with fewer code points are left alone; for scripts without spaces, with `min_words: 1`."""
    min_documents: Annotated[int, Field(ge=2)] = 2
    """A unit is repeated if at least so many documents have it; raise it to remove boilerplate alone."""
    action: Literal["keep_one", "cut_all"] = "keep_one"
    """What happens to a repeated unit: the document with the smallest id (a hash) keeps it, or nobody does."""
    within_documents: bool = True
    """Cut later copies inside one document too, however many documents have the unit."""
    max_removed_line_ratio: Fraction = 1.0
    """Documents that lose a larger share of the code points of their units are dropped; so are those left empty."""

    @property
    def edits_text(self) -> bool:
        """Whether the stage changes texts, beside keeping or dropping them."""
        return True
