"""The section `langid`: which languages are wanted."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import Fraction, Judging, OutsidePath, Positive


class LanguageId(Judging):
    """A fastText language model (lid.176 unless another is named) on documents and, where asked, on their lines.

    A document is judged by its likeliest language alone. (datatrove lets a document pass when any wanted language
    reaches the threshold; the two differ only for thresholds below 0.5, where a second language can reach it too.)
    """

    keep: tuple[str, ...] | dict[str, Fraction] = ("en",)
    """Wanted languages, or a mapping of each to its own threshold: `{en: 0.65, de: 0.5}`.

    Codes are those of the model: ISO 639-1 where there is one, else ISO 639-3; where its labels name a script too
    (`eng_Latn`), `en` takes every script of the language and `eng_Latn` (or `en_Latn`) one. Either way the column
    `language` has `en`, and `script` has `Latn`. `"*"` is every other language: `{en: 0.65, "*": 0.5}`; `{"*": 0}`
    drops nothing, and measures the language for the rules of a later `filter`.
    """
    threshold: Fraction = 0.65
    """Least score of the top language where `keep` has no threshold of its own (FineWeb: 0.65)."""
    max_characters: Positive = 2000
    """Characters of a document, and of a line, that are looked at."""
    sample: Literal["head", "spread"] = "head"
    """Which ones: the first, or four pieces spread evenly from the beginning to the end (long documents in which the
    language changes; pages whose first lines are a menu)."""
    newlines: Literal["space", "delete"] = "space"
    """What happens to line breaks, since fastText reads one line. DCLM deletes them, which fuses the words beside."""
    lines: bool = False
    """Identify every line too: columns `line_languages`, `line_language_share`."""
    line_threshold: Fraction = 0.5
    """A line with a lower score is of unknown language: it counts for no language and is never cut."""
    min_line_characters: Positive = 20
    """Shorter lines say too little: they are of unknown language."""
    min_line_language_share: Fraction | None = None
    """Drop documents with a smaller share of the characters of known lines in wanted languages; needs `lines`."""
    cut_other_lines: bool = False
    """Cut the lines that are known to be in languages which are not wanted; needs `lines`.

    A document is then judged by what is left of it, and by the whole of it where nothing is left.
    """
    model: OutsidePath | None = None
    """Any fastText model of languages (.bin, .ftz). A file called lid.176.ftz must be the published one; without a
    path that one is taken from the environment, the cache, its publisher or a wheel, in this order.

    Kernels of our own predict, as fastText 0.9.3 does, but add up the rows of a word once and keep the sum: of up to
    2,000 characters the labels are the same and the scores within 1e-5. A process holds the model's rows once
    (lid.176.ftz: 3.2 MB; a .bin: its file), each thread sums of words in at most 33,554,432 bytes. What they cannot
    use, such as quantised rows of over 4 GiB, fastText itself predicts with; the stage's `fallback` says why.

    lid.176.ftz is small and weak beyond the large languages: of lines of the Universal Declaration of Human Rights it
    names 1 % of the Bosnian ones right, none of Yoruba, 15 % of Somali, and 60 % over 119 languages (`gristmill bench
    quality`). For others give GlotLID's file (cis-lmu/glotlid, `model.bin`, 2,100 languages and scripts; Kargaran et
    al. 2023) or OpenLID's: `model: glotlid.bin`, `keep: {so: 0.5, yo: 0.5, eng_Latn: 0.65}`. Scores of different models
    are not alike: look at the report's, and give each language its own threshold.
    """
    labels: dict[str, str] = Field(default_factory=dict)
    """What labels of the model mean that are not codes of a language: `{__label__English: en, __label__zhs: zho_Hans}`.
    Codes of ISO 639-1, and those of ISO 639-3 with a script, need nothing here."""

    @model_validator(mode="after")
    def _consistent(self) -> LanguageId:
        if not self.keep:
            raise ValueError("keep names no language; name at least one, or leave the stage out")
        if not self.lines and (self.cut_other_lines or self.min_line_language_share is not None):
            raise ValueError("cut_other_lines and min_line_language_share look at lines; set lines: true")
        return self

    @property
    def edits_text(self) -> bool:
        """Whether the stage changes texts, beside keeping or dropping them."""
        return self.cut_other_lines
