"""The section `decontaminate`: evaluation text that must not be trained on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from gristmill.mixtures.base import Fraction, Judging, OutsidePath, Positive, Section

NotNegative = Annotated[int, Field(ge=0)]


class EvaluationSet(Section):
    """The items of one evaluation set, or of all that a glob or folder names."""

    path: OutsidePath
    """JSON lines, JSON, Parquet, CSV, TSV, or text with one item a line; compressed (`.gz`, `.zst`, `.bz2`) or not."""
    text_fields: tuple[str, ...] | None = None
    """Fields whose text counts: strings, or lists of strings. Where absent, all fields that hold a string.

    Name the question's field where answers are common sentences: each field is looked for on its own.
    """
    name: str | None = None
    """What reports call the set; otherwise the file's name without its extensions, which follows `name/` where the
    path names several files."""


class Decontaminate(Judging):
    """Documents that hold items of evaluation sets, found by word n-grams and judged by how much of an item they hold.

    A word is a lower-cased run of letters, digits and underscores; case, punctuation, layout and characters that
    nobody sees (soft hyphens, zero-width spaces) do not matter. Labels of prompts, such as `Question:`, `Context:` and
    the letters of choices, are removed from items; where some are within a text, it is looked for with and without
    them.

    One shared n-gram is mostly a quotation, a licence or a formula. A leak is recognised by how much of the item is
    there: `contamination` is the largest share of an item's words that lie in n-grams which the document has too
    (Touvron et al. 2023, Llama 2, section A.6), `contamination_words` the longest run of them.
    """

    against: Annotated[tuple[EvaluationSet, ...], Field(min_length=1)]
    """The evaluation sets; an entry that is only a path is the set there with the defaults."""
    ngram: Positive = 8
    """Words per n-gram, as in PaLM's contamination study (Chowdhery et al. 2022, section 8).

    This and `max_contamination` were chosen together, by `gristmill bench quality`: of the pairs that drop none of
    3,829 clean documents (so that the rate of false positives is below 0.1 %, with 95 % confidence) they find the most
    of items of four kinds of sets in ten disguises, 98 %. The 13-grams of GPT-3 (Brown et al.
    2020, appendix C) with half of an item find 80 %: one replaced word in twelve hides an item from them.
    """
    min_words: Positive = 7
    """Texts of an item with fewer words, or without a letter (rows of numbers), are not looked for; those with fewer
    words than `ngram` must be there as a whole.

    Of 77,018 questions and answers of eight public sets those of 7 words stood in none of these clean documents, two of
    those of 6 did.
    """
    max_document_frequency: Positive = 10
    """N-grams in more documents than this are common property (quotations, licences) and do not count.

    GPT-3 ignores n-grams of more than 10 documents for the same reason (Brown et al. 2020, appendix C).
    """
    certain_coverage: Fraction = 0.8
    """From this share of its words on an item counts, however frequent its n-grams are: a leak that was copied often.

    From 80 % on Llama 2 calls an item dirty (Touvron et al. 2023, section A.6).
    """
    max_contamination: Fraction = 0.4
    """Largest share of an item's words that a document may hold; see `ngram`."""
    max_contamination_words: Positive = 100
    """Longest run of an item's words that a document may hold; what finds pieces of long items."""
    action: Literal["drop", "excise"] = "drop"
    """Drop the document, or cut out what matched and keep the rest."""
    margin_characters: NotNegative = 200
    """With `excise`: code points cut on either side as well, at most; where an answer may stand.

    The cut ends at the outermost line break within the margin, or else at the outermost white space.
    """
    min_left_words: NotNegative = 50
    """With `excise`: documents that are left with fewer words are dropped."""

    @field_validator("against", mode="before")
    @classmethod
    def _paths_alone(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        return [{"path": item} if isinstance(item, str) else item for item in value] if _is_list(value) else value

    @property
    def edits_text(self) -> bool:
        """Whether the stage changes texts, beside keeping or dropping them."""
        return self.action == "excise"


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
