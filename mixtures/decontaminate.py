"""The section `decontaminate`: evaluation text that must not be trained on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gristmill.mixtures.section import Fraction, Judging, OutsidePath, Positive, Section

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

    A word is a lower-cased run of letters, digits and underscores; case, punctuation and layout do not matter. One
    shared n-gram is mostly a quotation, a licence or a formula. What tells a leak is how much of the item is there:
    `contamination` is the largest share of an item's words that lie in n-grams which the document has too (Touvron
    et al. 2023, Llama 2, section A.6), `contamination_words` the longest run of them.
    """

    against: Annotated[tuple[EvaluationSet, ...], Field(min_length=1)]
    """The evaluation sets; an entry that is only a path is the set there with the defaults."""
    ngram: Positive = 13
    """Words per n-gram (Brown et al. 2020, GPT-3, appendix C)."""
    min_words: Positive = 8
    """Texts of an item with fewer words are not looked for; those between this and `ngram` must be there as a whole.

    8 words is the n-gram of PaLM's contamination study (Chowdhery et al. 2022, section 8).
    """
    max_document_frequency: Positive = 10
    """N-grams in more documents than this are common property (quotations, licences) and do not count.

    GPT-3 ignores n-grams of more than 10 documents for the same reason (Brown et al. 2020, appendix C).
    """
    certain_coverage: Fraction = 0.8
    """From this share of its words on an item counts, however frequent its n-grams are: a leak that was copied often.

    From 80 % on Llama 2 calls an item dirty (Touvron et al. 2023, section A.6).
    """
    max_contamination: Fraction = 0.5
    """Largest share of an item's words that a document may hold."""
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

    @model_validator(mode="after")
    def _shorter_than_an_ngram(self) -> Decontaminate:
        if self.min_words > self.ngram:
            raise ValueError(f"min_words ({self.min_words}) must not exceed ngram ({self.ngram}); lower min_words")
        return self


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
