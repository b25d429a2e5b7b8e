"""The section `filter`: heuristic rule sets and their thresholds."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from gristmill.mixtures.rules_web import C4, MC4, FineWeb
from gristmill.mixtures.section import Judging, Section


class GopherQuality(Section):
    """Thresholds of the Gopher quality rules (Rae et al. 2021, appendix A1.1)."""

    min_words: int = 50
    max_words: int = 100_000
    min_mean_word_length: float = 3.0
    max_mean_word_length: float = 10.0
    max_symbol_word_ratio: float = 0.1
    max_bullet_line_ratio: float = 0.9
    max_ellipsis_line_ratio: float = 0.3
    min_alpha_word_ratio: float = 0.8
    min_stop_words: int = 2


class GopherRepetition(Section):
    """Thresholds of the Gopher repetition rules (Rae et al. 2021, table A1)."""

    max_duplicate_line_ratio: float = 0.30
    max_duplicate_paragraph_ratio: float = 0.30
    max_duplicate_line_char_ratio: float = 0.20
    max_duplicate_paragraph_char_ratio: float = 0.20
    max_top_2gram_char_ratio: float = 0.20
    max_top_3gram_char_ratio: float = 0.18
    max_top_4gram_char_ratio: float = 0.16
    max_duplicate_5gram_char_ratio: float = 0.15
    max_duplicate_6gram_char_ratio: float = 0.14
    max_duplicate_7gram_char_ratio: float = 0.13
    max_duplicate_8gram_char_ratio: float = 0.12
    max_duplicate_9gram_char_ratio: float = 0.11
    max_duplicate_10gram_char_ratio: float = 0.10


class Rules(Section):
    """Which rule sets judge a document; absent ones do not."""

    gopher_quality: GopherQuality | None = None
    gopher_repetition: GopherRepetition | None = None
    c4: C4 | None = None
    mc4: MC4 | None = None
    fineweb: FineWeb | None = None


class Filter(Judging):
    """Heuristic quality rules."""

    rules: Rules = Rules(gopher_quality=GopherQuality(), gopher_repetition=GopherRepetition())

    @field_validator("rules", mode="before")
    @classmethod
    def _rules_as_list(cls, value: Any) -> Any:
        """Accept `[gopher_quality, {gopher_repetition: {...}}]` beside the plain mapping."""
        if not isinstance(value, list):
            return value
        rules: dict[str, Any] = {}
        for item in value:
            pairs = {item: {}} if isinstance(item, str) else item
            if not isinstance(pairs, dict):
                raise ValueError(f"a rule is a name or a mapping of one name to its thresholds, not {item!r}")
            for name, thresholds in pairs.items():
                rules[name] = {} if thresholds is None else thresholds
        return rules
