"""Rule sets of the stage `filter` for text from the web: C4, mC4, FineWeb, Curator."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from gristmill.mixtures.section import Fraction, Positive, PositiveFloat, Section


class C4(Section):
    """C4's rules for whole documents (Raffel et al. 2020; released code: TensorFlow Datasets, text/c4_utils.py).

    Its rules for lines are `clean: {lines: [c4]}`, which belongs before `filter`. Definitions:
    dataprep/filtering/rules_c4.py.
    """

    constants: Literal["code", "paper"] = "code"
    """Whose least number of sentences is the default: 3 in the released code, 5 in the paper."""
    max_document_characters: Positive | None = 190_000
    """c4_utils.py, `is_valid_length`; the paper does not mention it."""
    max_lorem_ipsum: int = 0
    """Occurrences of the placeholder text."""
    max_curly_brackets: int = 0
    """Occurrences of `{`, which means code."""
    min_sentences: int = 3
    """The released code's; 5 with `constants: paper`."""

    @model_validator(mode="before")
    @classmethod
    def _constants(cls, value: Any) -> Any:
        return defaults_of(value, "constants", "code", {"code": {}, "paper": {"min_sentences": 5}})


class MC4(Section):
    """mC4's rule (Xue et al. 2021, section 3.1): a page has at least three long paragraphs, which are lines."""

    paragraph_characters: Positive = 200
    """A line of so many characters is a long paragraph."""
    min_long_paragraphs: int = 3
    """Long paragraphs of a page."""


class FineWeb(Section):
    """FineWeb's own rules (Penedo et al. 2024, section 3.6). Definitions: dataprep/filtering/rules_fineweb.py.

    FineWeb runs them after Gopher's and C4's (those without the rule that lines end in punctuation).
    """

    constants: Literal["paper", "datatrove"] = "paper"
    """Whose limit for characters in repeated lines is the default: 0.1 in the paper, 0.01 in datatrove's code."""
    short_line_characters: Positive = 30
    """A line of at most so many characters is short."""
    min_filled_lines: int = 1
    """datatrove's reason `empty`."""
    min_terminal_line_ratio: Fraction = 0.12
    """Share of lines that end in terminal punctuation."""
    max_short_line_ratio: Fraction = 0.67
    """Share of lines that are short."""
    max_repeated_line_char_ratio: Fraction = 0.1
    """Share of characters in lines that repeat earlier ones; 0.01 with `constants: datatrove`."""
    max_newline_word_ratio: PositiveFloat = 0.3
    """Newlines per word."""

    @model_validator(mode="before")
    @classmethod
    def _constants(cls, value: Any) -> Any:
        alias = {"paper": {}, "datatrove": {"max_repeated_line_char_ratio": 0.01}}
        return defaults_of(value, "constants", "paper", alias)


class Curator(Section):
    """NeMo Curator's heuristics for English beside Gopher's rules (config/text/heuristic_filter_english_pipeline.yaml).

    Definitions: dataprep/filtering/rules_curator.py. The pipeline also has Gopher's rules, in Curator's dialect.
    """

    max_non_alphanumeric_ratio: Fraction = 0.25
    """Share of characters that are no ASCII letters, digits, newlines or `?!,.`."""
    max_digit_ratio: Fraction = 0.15
    """Share of characters that are digits."""
    max_url_char_ratio: Fraction = 0.2
    """Share of characters in URLs, their paths not counted."""
    max_whitespace_ratio: Fraction = 0.25
    """Share of characters that are white space."""
    max_bracket_ratio: Fraction = 0.1
    """Share of characters that are brackets."""
    max_boilerplate_paragraph_ratio: Fraction = 0.4
    """Share of paragraphs with a phrase of cookie notices and the like."""
    max_unended_line_ratio: Fraction = 0.85
    """Share of lines that end in no punctuation."""
    max_longest_word_characters: Positive = 1000
    """Characters of the longest word."""


def defaults_of(value: Any, key: str, default: str, aliases: dict[str, dict[str, Any]]) -> Any:
    """A section as it was written, with the defaults that its alias stands for where it gives no others.

    Args:
        key: the field that names the alias; `default` where it is absent.
        aliases: alias -> the defaults that differ from those of the fields.
    """
    if not isinstance(value, dict):
        return value
    return {**aliases.get(str(value.get(key, default)), {}), **value}
