"""The section `clean`: edits that improve text instead of dropping it.

The order of the steps is fixed: `fix_unicode`, `normalise`, the line rules (`c4`, then
`dclm`), `max_newlines`, `mask`. Each operates on the text as left by the steps before
it. A document without any word left is dropped: `clean/empty`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import field_validator, model_validator

from gristmill.mixtures.base import (
    Count,
    Fraction,
    Judging,
    OutsidePath,
    Positive,
    Section,
    named_items,
)

PiiKind = Literal["email", "ip", "phone", "iban", "card"]

C4_MIN_WORDS = {"code": 5, "paper": 3}
"""Smallest number of words per line: as released (tensorflow/datasets, `c4_utils.py`),
and in Raffel et al. 2020, section 2.2.
"""


class C4Lines(Section):
    """C4's rules for dropping lines and removing parts of them (tensorflow/datasets,
    `c4_utils.py`, `clean_page`).

    A text is split into lines by `str.splitlines()`; each is stripped, and the kept
    lines are joined by newlines. The first matching rule drops a line.
    """

    constants: Literal["code", "paper"] = "code"
    """Default of `min_words`: the released code has 5, the paper says 3."""
    max_word_characters: Count = 1000
    """Drop a line with a longer word; 0 disables the rule."""
    citations: bool = True
    """Remove `[1]`, `[]`, `[edit]` and `[citation needed]` from lines."""
    terminal_punctuation: bool = True
    """Drop a line that does not end in `.`, `?`, `!` or `"`, or that ends in `...`
    (FineWeb disables this rule).
    """
    dialect: Literal["c4", "datatrove"] = "c4"
    """Marks that end a sentence: those of the released code, or datatrove's
    (`C4QualityFilter`), which include `'`, and so keep lines that close a quotation
    with it.
    """
    min_words: Count = C4_MIN_WORDS["code"]
    """Drop a line with fewer words; 0 disables the rule."""
    javascript: bool = True
    """Drop a line with `javascript` in any case."""
    policy: bool = True
    """Drop a line with one of six phrases on cookies, privacy and terms of use in any
    case.
    """

    @model_validator(mode="before")
    @classmethod
    def _take_constants(cls, value: Any) -> Any:
        if (
            isinstance(value, dict)
            and "min_words" not in value
            and value.get("constants") in C4_MIN_WORDS
        ):
            return {**value, "min_words": C4_MIN_WORDS[value["constants"]]}
        return value


class DclmLines(Section):
    """RefinedWeb's line corrections as in DCLM (mlfoundations/dclm,
    `dclm_baseline_refinedweb.yaml`).

    Lines are separated by newlines; empty ones stay. The rules run in this order, each
    over the whole text:
    """

    max_uppercase_ratio: Fraction | None = 0.5
    """Drop a line with a larger share of upper-case characters; null disables the
    rule.
    """
    max_digit_ratio: Fraction | None = 0.999999
    """Drop a line with a larger share of digits: that is, only digits; null disables
    the rule.
    """
    counters: bool = True
    """Drop a line that is a counter, such as `3 likes` or `1.2K views`."""
    min_words: Count = 2
    """Drop a line with fewer words, unless it is empty; 0 disables the rule."""
    substrings: bool = True
    """Remove `items in cart`, a closing `Read more...` and an opening `Sign-in`, in any
    case, from short lines.
    """
    max_substring_words: Count = 10
    """Largest number of words of a line from which those substrings are removed."""


class LineRules(Section):
    """Line rules to run; absent ones do not run."""

    c4: C4Lines | None = None
    dclm: DclmLines | None = None


class Entities(Section):
    """Names and places that a spaCy pipeline recognises (gristmill[spacy]). A document of
    more than 1,000,000 characters is quarantined, as spaCy refuses it.
    """

    path: OutsidePath
    """Folder of a pipeline with an entity recogniser: that with its config.cfg."""
    labels: tuple[str, ...] = ("PERSON",)
    """Labels of the pipeline that are masked. English and Chinese pipelines of spaCy
    have `PERSON`, `FAC`, `GPE` and `LOC` (OntoNotes), others `PER` and `LOC`.
    """


class Mask(Section):
    """Replacement of personal data. `dataprep/cleaning/pii.py` defines what counts as
    personal data.

    Values that identify nobody stay unmasked: mail addresses at the domains that RFC
    2606 reserves (`example.com`, `example.net`, `example.org`, their subdomains, and
    names ending in a word that is not a top level of the public suffix list, such as
    `.test`, `.example`, `.invalid` and `.localhost`) and users of code hosts
    (`git@github.com:me/it.git`); private, loopback, documentation and other addresses
    that are not global, network addresses (`.0` or `::` at the end), and four numbers
    that read as a version; the North American numbers 555-0100 to 555-0199, and British
    and Australian numbers reserved for drama unless a word such as `tel` precedes them;
    card numbers and IBANs with a wrong check digit. Identity numbers and addresses
    written out (`jane at host dot com`) are not detected, nor, without `entities`,
    names of people and places.

    The report has the number of values by source and kind, with examples.
    """

    added = ("entities", "show_values")

    kinds: tuple[PiiKind, ...] = ("email", "ip")
    """`email`; `ip`: public IPv4 and IPv6 addresses; `phone`; `iban`; `card`: payment
    card numbers (FineWeb masks the first two).
    """
    style: Literal["placeholder", "tag"] = "placeholder"
    """`placeholder`: values that belong to nobody (example.com, documentation
    addresses), equal for equal values; `tag`: `<EMAIL>`, `<IP>`, `<PHONE>`, `<IBAN>`,
    `<CARD>`.
    """
    entities: Entities | None = None
    """Names and places to mask besides."""
    show_values: bool = False
    """Show the values of the report's examples; by default only their shape
    (`xxxx@xxxx.xx`, `999-999-9999`). Contexts are always masked.
    """

    @field_validator("kinds")
    @classmethod
    def _each_once(cls, kinds: tuple[PiiKind, ...]) -> tuple[PiiKind, ...]:
        if len(set(kinds)) != len(kinds):
            raise ValueError("name each kind only once")
        return kinds

    def _problems(self) -> Iterator[str]:
        if not self.kinds and self.entities is None:
            yield "name at least one kind; leave `mask` out to disable masking"


class Clean(Judging):
    """Unicode repair, line rules and masking of personal data."""

    fix_unicode: bool = False
    """Repair mojibake, HTML entities, lossy sequences and control characters with ftfy,
    configured as in FineWeb-2: quotes, ligatures, character width, line breaks and
    normalisation stay unchanged.
    """
    normalise: Literal["none", "NFC", "NFKC"] = "none"
    """Unicode normalisation form (UAX 15). NFKC also folds ligatures, widths and
    superscripts.
    """
    lines: LineRules | None = None
    """Line rules: a mapping as here, or a list of names and single mappings: `[c4,
    {dclm: {counters: false}}]`. They run in the order of this reference (`c4` before
    `dclm`), whatever the order of the list.
    """
    max_removed_word_ratio: Fraction | None = 0.05
    """Drop a document that loses a larger share of its words to the rules `dclm` (DCLM:
    0.05); null keeps all. Words are those of `str.split()`, whereas DCLM counts a
    Unicode segmentation.
    """
    max_newlines: Positive | None = None
    """Largest number of consecutive newlines, U+000A or U+000D U+000A; longer runs are
    cut (DCLM: 2, of U+000A only).
    """
    mask: Mask | None = None
    """Replace personal data; a list stands for its `kinds`: `[email, ip, phone]`."""

    @field_validator("lines", mode="before")
    @classmethod
    def _lines_as_list(cls, value: Any) -> Any:
        return dict(named_items(value)) if isinstance(value, list) else value

    @field_validator("mask", mode="before")
    @classmethod
    def _kinds_as_list(cls, value: Any) -> Any:
        return {"kinds": value} if isinstance(value, list) else value

    @property
    def edits_text(self) -> bool:
        """True if the stage changes texts besides keeping or dropping them."""
        return True
