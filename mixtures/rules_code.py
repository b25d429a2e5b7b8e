"""The rule set `code` of the stage `filter`: source code."""

from __future__ import annotations

from gristmill.mixtures.section import Fraction, Positive, PositiveFloat, Section


class Code(Section):
    """Rules for files of source code, by the extension of their names. Definitions: dataprep/filtering/rules_code.py.

    Most are StarCoder's (Li et al. 2023, section 3.1) and StarCoder2's (Lozhkov et al. 2024, section 2.1). A rule that
    an extension is exempt from measures null there, and drops nothing.
    """

    path_field: str | None = None
    """Key of the metadata that holds a file's path; without it, the locator is the path."""
    max_generated_markers: int = 0
    """Phrases such as `auto-generated` in the first five lines (StarCoder2)."""
    max_minified: int = 0
    """JavaScript and CSS without line breaks (GitHub Linguist, lib/linguist/generated.rb)."""
    max_xml_header: int = 0
    """`<?xml version=` in the first 100 characters of what is not named as XML (StarCoder)."""
    max_code_lines: Positive | None = 100_000
    """StarCoder2."""
    max_data_lines: Positive | None = 512
    """Lines of text, JSON, YAML, OWL and Graphviz (StarCoder2)."""
    min_data_characters: Positive | None = 50
    """Characters of JSON and YAML (StarCoder)."""
    max_data_characters: Positive | None = 5000
    """Characters of JSON and YAML (StarCoder)."""
    max_longest_line_characters: Positive | None = 1000
    """Longest line, markup and data excepted (Codex, The Stack, RedPajama, StarCoder2)."""
    max_mean_line_characters: PositiveFloat | None = 100.0
    """Mean length of lines, markup and data excepted (Codex, The Stack, RedPajama, StarCoder2)."""
    max_longest_markup_line_characters: Positive | None = 100_000
    """Longest line of markup and data (StarCoder2)."""
    min_alphanumeric_ratio: Fraction | None = 0.25
    """The Stack, RedPajama."""
    min_alphabetic_ratio: Fraction | None = 0.25
    """StarCoder, StarCoder2."""
    max_longest_encoded_characters: Positive | None = 1024
    """Longest piece of Base64, hexadecimal or escaped data (StarCoder2)."""
    max_encoded_ratio: Fraction | None = 0.5
    """Share of characters in such pieces (StarCoder2)."""
    min_html_visible_characters: Positive | None = 100
    """Characters of HTML that a reader sees (StarCoder)."""
    min_html_visible_ratio: Fraction | None = 0.2
    """Share of HTML that a reader sees (StarCoder)."""
    min_code_tokens: Positive | None = 40
    """Words and marks of a file. PolyCoder (Xu et al. 2022) has 100 tokens of GPT-2, of which Python has 2.5 a word."""
