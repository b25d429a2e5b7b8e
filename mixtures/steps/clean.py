"""The section `clean`: edits that make text better instead of dropping it.

The order of the steps is fixed: `fix_unicode`, `normalise`, the line rules (`c4`, then `dclm`), `max_newlines`, `mask`.
Each sees the text as the steps before it left it. A document that has no word left is dropped: `clean/empty`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gristmill.mixtures.base import Fraction, Judging, Positive, Section

Count = Annotated[int, Field(ge=0)]
PiiKind = Literal["email", "ip", "phone", "iban", "card"]

C4_MIN_WORDS = {"code": 5, "paper": 3}
"""Least words per line: as released (tensorflow/datasets, `c4_utils.py`), and as in Raffel et al. 2020, section 2.2."""


class C4Lines(Section):
    """Which lines C4 drops, and what it takes out of the others (tensorflow/datasets, `c4_utils.py`, `clean_page`).

    A text is cut into lines as `str.splitlines()` does; each is stripped, and those that are left are joined by
    newlines. A line goes where the first of these rules says so.
    """

    constants: Literal["code", "paper"] = "code"
    """Where an absent `min_words` comes from: the released code has 5, the paper says 3."""
    max_word_characters: Count = 1000
    """A line with a longer word goes; 0 switches the rule off."""
    citations: bool = True
    """Take `[1]`, `[]`, `[edit]` and `[citation needed]` out of lines."""
    terminal_punctuation: bool = True
    """A line goes that does not end in `.`, `?`, `!` or `"`, or that ends in `...` (FineWeb runs without this rule)."""
    dialect: Literal["c4", "datatrove"] = "c4"
    """Which marks end a sentence: those of the released code, or datatrove's (`C4QualityFilter`), which takes `'` too,
    and so keeps lines that close a quotation with it."""
    min_words: Count = C4_MIN_WORDS["code"]
    """A line with fewer words goes; 0 switches the rule off."""
    javascript: bool = True
    """A line with `javascript` in any case goes."""
    policy: bool = True
    """A line with one of six phrases on cookies, privacy and terms of use in any case goes."""

    @model_validator(mode="before")
    @classmethod
    def _take_constants(cls, value: Any) -> Any:
        if isinstance(value, dict) and "min_words" not in value and value.get("constants") in C4_MIN_WORDS:
            return {**value, "min_words": C4_MIN_WORDS[value["constants"]]}
        return value


class DclmLines(Section):
    """RefinedWeb's line corrections as DCLM has them (mlfoundations/dclm, `dclm_baseline_refinedweb.yaml`).

    Lines are separated by newlines; empty ones stay. In this order, each over the whole text:
    """

    max_uppercase_ratio: Fraction | None = 0.5
    """A line goes where more of its characters are upper case; null switches the rule off."""
    max_digit_ratio: Fraction | None = 0.999999
    """A line goes where more of its characters are digits: that is, all of them; null switches the rule off."""
    counters: bool = True
    """A line goes that is a counter, such as `3 likes` or `1.2K views`."""
    min_words: Count = 2
    """A line with fewer words goes, unless it is empty; 0 switches the rule off."""
    substrings: bool = True
    """Take `items in cart`, a closing `Read more...` and an opening `Sign-in`, in any case, out of short lines."""
    max_substring_words: Count = 10
    """Lines of more words keep those substrings."""


class LineRules(Section):
    """Which line rules run; absent ones do not."""

    c4: C4Lines | None = None
    dclm: DclmLines | None = None


class Mask(Section):
    """Personal data that is replaced. What counts as what is defined in `dataprep/cleaning/pii.py`.

    Values that identify nobody stay unmasked: mail addresses at the domains that RFC 2606 reserves (`example.com`,
    `example.net`, `example.org`, their subdomains, and names ending in a word that is not a top level of the public
    suffix list, such as `.test`, `.example`, `.invalid` and `.localhost`) and users of code hosts
    (`git@github.com:me/it.git`); private, loopback, documentation and other addresses that are not global, network
    addresses (`.0` or `::` at the end), and four numbers that read as a version; the North American numbers 555-0100
    to 555-0199, and British and Australian numbers reserved for drama unless a word such as `tel` precedes them; card
    numbers and IBANs with a wrong check digit. Names of people, postal addresses, identity numbers and addresses
    written out (`jane at host dot com`) are not looked for.
    """

    kinds: tuple[PiiKind, ...] = ("email", "ip")
    """`email`; `ip`: public IPv4 and IPv6 addresses; `phone`; `iban`; `card`: payment card numbers (FineWeb masks
    the first two)."""
    style: Literal["placeholder", "tag"] = "placeholder"
    """`placeholder`: values that belong to nobody (example.com, documentation addresses), the same one for
    equal values; `tag`: `<EMAIL>`, `<IP>`, `<PHONE>`, `<IBAN>`, `<CARD>`."""

    @field_validator("kinds")
    @classmethod
    def _each_once(cls, kinds: tuple[PiiKind, ...]) -> tuple[PiiKind, ...]:
        if not kinds or len(set(kinds)) != len(kinds):
            raise ValueError("name at least one kind, and each only once; leave `mask` out to mask nothing")
        return kinds


class Clean(Judging):
    """Unicode repair, line rules and masking of personal data."""

    fix_unicode: bool = False
    """Repair mojibake, HTML entities, lossy sequences and control characters with ftfy, set up as FineWeb-2 has it:
    no change of quotes, ligatures, character width, line breaks or normalisation."""
    normalise: Literal["none", "NFC", "NFKC"] = "none"
    """Unicode normalisation form (UAX 15). NFKC also folds ligatures, widths and superscripts."""
    lines: LineRules | None = None
    """Line rules: a mapping as here, or a list of names and single mappings: `[c4, {dclm: {counters: false}}]`.
    Steps run in the order of this reference (`c4` before `dclm`), whatever the order of the list."""
    max_removed_word_ratio: Fraction | None = 0.05
    """Drop a document of which the rules `dclm` took more of the words (DCLM: 0.05); null keeps all. Words are those of
    `str.split()`, where DCLM counts a segmentation of Unicode's."""
    max_newlines: Positive | None = None
    """Most newlines in a row, U+000A or U+000D U+000A; longer runs are cut (DCLM: 2, of U+000A alone)."""
    mask: Mask | None = None
    """Replace personal data; a list is short for its `kinds`: `[email, ip, phone]`."""

    @field_validator("lines", mode="before")
    @classmethod
    def _lines_as_list(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        rules: dict[str, Any] = {}
        for item in value:
            pairs = {item: {}} if isinstance(item, str) else item
            if not isinstance(pairs, dict):
                raise ValueError(f"a line rule set is a name or a mapping of one name to its options, not {item!r}")
            rules.update({name: {} if options is None else options for name, options in pairs.items()})
        return rules

    @field_validator("mask", mode="before")
    @classmethod
    def _kinds_as_list(cls, value: Any) -> Any:
        return {"kinds": value} if isinstance(value, list) else value

    @property
    def edits_text(self) -> bool:
        """Whether the stage changes texts, beside keeping or dropping them."""
        return True
