"""The section `decontaminate`: evaluation text that must not be trained on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from gristmill.mixtures.base import (
    Count,
    Fraction,
    Judging,
    NonEmpty,
    OutsidePath,
    Positive,
    Section,
)


class EvaluationSet(Section):
    """The items of one evaluation set, or of all sets that a glob or folder names."""

    path: OutsidePath
    """JSON lines, a JSON list of objects, Parquet, CSV, TSV, or text with one item per
    line; compressed (`.gz`, `.zst`, `.bz2`) or not.
    """
    text_fields: tuple[str, ...] | None = None
    """Fields whose text counts: strings, or lists of strings. If absent, all fields
    that hold a string.

    Name only the question's field if answers are common sentences, since each field is
    searched on its own.
    """
    name: str | None = None
    """Name of the set in reports; if absent, the file's name without its extensions,
    after `name/` if the path names several files.
    """


class Decontaminate(Judging):
    """Documents that contain items of evaluation sets, found by word n-grams and judged
    by the share of an item in them.

    A word is a lower-cased run of letters, digits and underscores; case, punctuation,
    layout and invisible characters (soft hyphens, zero-width spaces) do not matter.
    Labels of prompts, such as `Question:`, `Context:` and the letters of choices, are
    removed from items; a text with labels inside is searched both with and without
    them.

    One shared n-gram is mostly a quotation, a licence or a formula. A leak is
    recognised by the share of the item that the document contains: `contamination` is
    the largest share of an item's words in n-grams that the document has too (Touvron
    et al. 2023, Llama 2, section A.6), `contamination_words` the longest run of them.
    """

    against: NonEmpty[EvaluationSet]
    """The evaluation sets; an entry that is only a path stands for the set there with
    the defaults.
    """
    ngram: Positive = 8
    """Words per n-gram, as in PaLM's contamination study (Chowdhery et al. 2022,
    section 8).

    This and `max_contamination` were chosen together, by `gristmill bench quality`: of
    the pairs that drop none of 3,829 clean documents (so that the rate of false
    positives is below 0.1 %, with 95 % confidence) they find the most of items of four
    kinds of sets in ten disguises, 98 %. The 13-grams of GPT-3 (Brown et al. 2020,
    appendix C) with half of an item find 80 %: one replaced word in twelve hides an
    item from them.
    """
    min_words: Positive = 7
    """Texts of an item with fewer words, or without a letter (rows of numbers), are not
    searched; those with fewer words than `ngram` must occur as a whole.

    Of 77,018 questions and answers of eight public sets, those of 7 words occurred in
    none of these clean documents, two of those of 6 words did.
    """
    max_document_frequency: Positive = 10
    """N-grams in more documents than this are common phrases (quotations, licences) and
    do not count.

    GPT-3 ignores n-grams of more than 10 documents for the same reason (Brown et al.
    2020, appendix C).
    """
    certain_coverage: Fraction = 0.8
    """Share of its words from which an item counts, however frequent its n-grams are: a
    leak that was copied often.

    Llama 2 calls an item dirty from 80 % on (Touvron et al. 2023, section A.6).
    """
    max_contamination: Fraction = 0.4
    """Largest share of an item's words that a document may contain; see `ngram`."""
    max_contamination_words: Positive = 100
    """Longest run of an item's words that a document may contain; this finds pieces of
    long items.
    """
    action: Literal["drop", "excise"] = "drop"
    """Drop the document, or cut out the matching passages and keep the remainder."""
    margin_characters: Count = 200
    """With `excise`: largest number of code points to cut on either side as well, where
    an answer may be.

    The cut ends at the outermost line break within the margin, or else at the outermost
    white space.
    """
    min_left_words: Count = 50
    """With `excise`: documents with fewer words left are dropped."""

    @field_validator("against", mode="before")
    @classmethod
    def _paths_alone(cls, value: Any) -> Any:
        paths = [value] if isinstance(value, str) else value
        if not isinstance(paths, list | tuple):
            return paths
        return [{"path": path} if isinstance(path, str) else path for path in paths]

    @property
    def edits_text(self) -> bool:
        """True if the stage changes texts besides keeping or dropping them."""
        return self.action == "excise"
