"""The section `filter`: heuristic rule sets and their thresholds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from gristmill.mixtures.rules_code import Code
from gristmill.mixtures.rules_lists import BadWords, Toxicity, Urls
from gristmill.mixtures.rules_presets import PRESETS, add_to_schema, expand
from gristmill.mixtures.rules_web import C4, MC4, Curator, FineWeb
from gristmill.mixtures.section import Judging, Section

Dialect = Literal["dclm", "datatrove", "dolma", "curator", "redpajama"]
"""Whose definition of the Gopher statistics is meant; `gopher_<dialect>.py` in dataprep writes each one down."""


class GopherRules(Section):
    """What both Gopher rule sets have in common: how the statistics are counted."""

    dialect: Dialect = "dclm"
    """Whose counting: the projects share the thresholds, but count words, lines, symbols and repeated n-grams in their
    own ways, so that they keep different documents (`gristmill dialects MANIFEST` shows which)."""
    words: Literal["dialect", "exact", "unicode"] = "dialect"
    """How text is cut into words. `dialect`: as the dialect does it; where that takes a library (datatrove: spaCy), by
    a rule that comes close to it. `exact`: by that library itself (datatrove only; needs the package spacy; for
    English). `unicode`: between spaces, and each character of scripts without spaces (Chinese, Japanese, Thai, Lao,
    Khmer, Burmese) is a word; documents in these languages are cut like that under `dialect` too."""
    language: Annotated[str, Field(pattern=r"^(auto|[a-z]{2,3})$")] = "auto"
    """Whose stop words count, and whether the script has spaces: an ISO 639 code, or `auto` for each document's own,
    which the stage `langid` measured if it ran before (otherwise English). A language without a list of stop words
    is not judged by them. Text in a script without spaces is not judged by its mean word length, and its n-grams
    take two characters (Chinese, Japanese) or three (Thai, Lao, Khmer, Burmese) for a word."""

    @model_validator(mode="after")
    def _exact_words(self) -> Self:
        if self.words == "exact" and self.dialect != "datatrove":
            raise ValueError(f"words: exact is for dialect: datatrove, whose words are spaCy's; leave it out for "
                             f"dialect: {self.dialect}")
        return self


class GopherQuality(GopherRules):
    """Thresholds of the Gopher quality rules (Rae et al. 2021, appendix A1.1)."""

    min_words: int = 50
    """Least number of words."""
    max_words: int = 100_000
    """Largest number of words."""
    min_mean_word_length: float = 3.0
    """Least mean length of words, in characters."""
    max_mean_word_length: float = 10.0
    """Largest mean length of words, in characters."""
    max_symbol_word_ratio: float = 0.1
    """Hash signs and ellipses per word."""
    max_bullet_line_ratio: float = 0.9
    """Share of lines that begin with a bullet."""
    max_ellipsis_line_ratio: float = 0.3
    """Share of lines that end in an ellipsis."""
    min_alpha_word_ratio: float = 0.8
    """Share of words with a letter."""
    min_stop_words: int = 2
    """Stop words of the text's language."""


class GopherRepetition(GopherRules):
    """Thresholds of the Gopher repetition rules (Rae et al. 2021, table A1)."""

    max_duplicate_line_ratio: float = 0.30
    """Share of lines that are repeated."""
    max_duplicate_paragraph_ratio: float = 0.30
    """Share of paragraphs that are repeated."""
    max_duplicate_line_char_ratio: float = 0.20
    """Share of characters in repeated lines."""
    max_duplicate_paragraph_char_ratio: float = 0.20
    """Share of characters in repeated paragraphs."""
    max_top_2gram_char_ratio: float = 0.20
    """Share of characters in the most frequent sequence of 2 words."""
    max_top_3gram_char_ratio: float = 0.18
    """Share of characters in the most frequent sequence of 3 words."""
    max_top_4gram_char_ratio: float = 0.16
    """Share of characters in the most frequent sequence of 4 words."""
    max_duplicate_5gram_char_ratio: float = 0.15
    """Share of characters in repeated sequences of 5 words."""
    max_duplicate_6gram_char_ratio: float = 0.14
    """Share of characters in repeated sequences of 6 words."""
    max_duplicate_7gram_char_ratio: float = 0.13
    """Share of characters in repeated sequences of 7 words."""
    max_duplicate_8gram_char_ratio: float = 0.12
    """Share of characters in repeated sequences of 8 words."""
    max_duplicate_9gram_char_ratio: float = 0.11
    """Share of characters in repeated sequences of 9 words."""
    max_duplicate_10gram_char_ratio: float = 0.10
    """Share of characters in repeated sequences of 10 words."""


class Rules(Section):
    """Which rule sets judge a document; absent ones do not."""

    model_config = ConfigDict(json_schema_extra=add_to_schema)

    gopher_quality: GopherQuality | None = None
    gopher_repetition: GopherRepetition | None = None
    c4: C4 | None = None
    mc4: MC4 | None = None
    fineweb: FineWeb | None = None
    curator: Curator | None = None
    code: Code | None = None
    urls: Urls | None = None
    bad_words: BadWords | None = None
    toxicity: Toxicity | None = None

    @model_serializer(mode="wrap")
    def _only_configured(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is absent, so that a rule set that is new to the schema changes no fingerprint."""
        return {name: section for name, section in dump(self).items() if section is not None}


class Filter(Judging):
    """Heuristic quality rules."""

    rules: Rules = Rules(gopher_quality=GopherQuality(), gopher_repetition=GopherRepetition())
    rule_sources: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Rule set or preset -> the only sources that it judges, where those are not all: `{fineweb: [web], code: [git]}`.
    What such a set measures is null for documents of other sources."""

    @field_validator("rules", mode="before", json_schema_input_type=Rules | list[str | Rules])
    @classmethod
    def _forms(cls, value: Any) -> Any:
        """Accept `[gopher_quality, {gopher_repetition: {...}}]` beside the plain mapping, and presets in both."""
        return expand(value)

    @field_validator("rule_sources", mode="before")
    @classmethod
    def _without_presets(cls, value: Any) -> Any:
        """Give the sources of a preset to the rule sets that it stands for."""
        if not isinstance(value, dict):
            return value
        return {rule_set: sources for name, sources in value.items() for rule_set in PRESETS.get(name, (name,))}

    @model_validator(mode="after")
    def _only_of_configured_sets(self) -> Self:
        configured = [name for name in type(self.rules).model_fields if getattr(self.rules, name) is not None]
        unknown = [name for name in self.rule_sources if name not in configured]
        if unknown:
            raise ValueError(f"rule_sources names {', '.join(unknown)}, but `rules` has only {', '.join(configured)}")
        return self
