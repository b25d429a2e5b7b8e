"""The section `langid`: the languages to keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from gristmill.mixtures.base import Fraction, Judging, OutsidePath, Positive


class LanguageId(Judging):
    """A fastText language model (lid.176 unless another is set) on documents.

    A document is judged only by its most likely language. (datatrove lets a document
    pass if any kept language reaches the threshold; the two differ only for thresholds
    below 0.5, which a second language can reach too.)
    """

    keep: tuple[str, ...] | dict[str, Fraction] = ("en",)
    """Languages to keep, or a mapping of each to its own threshold: `{en: 0.65, de:
    0.5}`.

    Codes are those of the model: ISO 639-1 if it exists, else ISO 639-3; if its labels
    include a script (`eng_Latn`), `en` matches every script of the language and
    `eng_Latn` (or `en_Latn`) one. In both cases the column `language` has `en`, and
    `script` has `Latn`. `"*"` is every other language: `{en: 0.65, "*": 0.5}`; `{"*":
    0}` drops nothing, and measures the language for the rules of a later `filter`.
    """
    threshold: Fraction = 0.65
    """Smallest score of the top language if `keep` has no threshold for it (FineWeb:
    0.65).
    """
    max_characters: Positive = 2000
    """Characters of a document that are examined."""
    sample: Literal["head", "spread"] = "head"
    """Choice of these characters: the first, or four pieces spread evenly from the
    beginning to the end (for long documents in which the language changes, and pages
    whose first lines are a menu).
    """
    newlines: Literal["space", "delete"] = "space"
    """Treatment of line breaks, since fastText reads one line. DCLM deletes them, which
    joins the adjacent words.
    """
    model: OutsidePath | None = None
    """A fastText language model (.bin, .ftz). A file named lid.176.ftz must be the
    published one; without a path, that one is taken from the environment, the cache,
    its publisher or a wheel, in this order.

    Kernels of our own predict as fastText 0.9.3 does, but add up the rows of a word
    once and keep the sum: for up to 2,000 characters the labels are the same and the
    scores within 1e-5. A process holds the model's rows once (lid.176.ftz: 3.2 MB; a
    .bin: its file), each thread sums of words in at most 33,554,432 bytes. Models that
    they do not support, such as quantised rows of over 4 GiB, are refused.

    lid.176.ftz is small and weak beyond the large languages: of lines of the Universal
    Declaration of Human Rights it identifies 1 % of the Bosnian ones correctly, none of
    Yoruba, 15 % of Somali, and 60 % over 119 languages (`gristmill bench quality`). For
    others use GlotLID's file (cis-lmu/glotlid, `model.bin`, 2,100 languages and
    scripts; Kargaran et al. 2023) or OpenLID's: `model: glotlid.bin`, `keep: {so: 0.5,
    yo: 0.5, eng_Latn: 0.65}`. Scores of different models are not comparable: check the
    report's, and give each language its own threshold.
    """
    labels: dict[str, str] = Field(default_factory=dict)
    """Languages of the model's labels that are not codes of a language:
    `{__label__English: en, __label__zhs: zho_Hans}`. Codes of ISO 639-1, and those of
    ISO 639-3 with a script, need no entry.
    """

    def _problems(self) -> Iterator[str]:
        if not self.keep:
            yield "keep is empty; name at least one language, or leave the stage out"
