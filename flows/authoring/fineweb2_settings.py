"""FineWeb-2's settings of a language as manifest rules (Penedo et al. 2025;
`fineweb-2-pipeline.py`).

FineWeb-2 publishes a file for each of 1,900 languages and scripts
(`configs/deu_Latn.yml` of huggingface/fineweb-2): the minimum GlotLID score, stop
words, and thresholds, most of them derived from the distribution of values in a
language's text. Its pipeline sets further values for all languages. With both, a filter
reaches the verdicts of FineWeb-2's three filters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from gristmill.mixtures.steps.filter import LANGUAGE
from gristmill.mixtures.yaml_text import YamlFileError, read_yaml

RuleSets = Mapping[str, Mapping[str, float | str | list[str]]]
"""Rule set -> its settings."""
GENERAL: RuleSets = {
    "gopher_quality": {"dialect": "datatrove", "words": "language"},
    "gopher_repetition": {
        "dialect": "datatrove",
        "words": "language",
        "max_duplicate_paragraph_ratio": 1.0,
        "max_duplicate_line_char_ratio": 1.0,
        "max_duplicate_paragraph_char_ratio": 1.0,
    },
    "fineweb": {
        "words": "language",
        "max_short_line_ratio": 1.0,
        "max_repeated_line_char_ratio": 0.1,
    },
}
"""Settings of its pipeline for all languages; shares of paragraphs and short lines are
unlimited.
"""


class LanguageSettings(TypedDict):
    """The keys of a published file that are used here."""

    dup_line_frac: float
    dup_n_grams: list[tuple[int, float]]
    language_score: float
    line_punct_thr: float
    max_avg_word_length: float
    max_non_alpha_words_ratio: float
    min_avg_word_length: float
    new_line_ratio: float
    stopwords: list[str]
    top_n_grams: list[tuple[int, float]]


class SettingsError(ValueError):
    """The file does not hold settings of FineWeb-2."""


def read_settings(paths: Sequence[str]) -> dict[str, LanguageSettings]:
    """Read the settings of some languages by file stem (`deu_Latn`).

    Raises:
        SettingsError: a file cannot be read, or has other keys.
    """
    settings_by_language = {}
    for path in map(Path, paths):
        try:
            settings = read_yaml(path)
        except YamlFileError as error:
            raise SettingsError(str(error)) from error
        problem = None
        missing = [
            key
            for key in LanguageSettings.__annotations__
            if not isinstance(settings, Mapping) or key not in settings
        ]
        if missing:
            problem = f"has no {', '.join(missing)}"
        elif not LANGUAGE.fullmatch(path.stem):
            problem = "is not named after a language"
        if problem:
            raise SettingsError(
                f"{path} {problem}; give files of "
                "huggingface/fineweb-2, such as configs/deu_Latn.yml"
            )
        settings_by_language[path.stem] = settings
    return settings_by_language


def rules_of_settings(settings: LanguageSettings) -> RuleSets:
    """Return the thresholds and stop words of one language that differ from GENERAL.

    A maximum share of 0 means "no limit", as in datatrove.
    """
    quality: dict[str, float | list[str]] = {
        "min_mean_word_length": float(settings["min_avg_word_length"]),
        "max_mean_word_length": float(settings["max_avg_word_length"]),
        "min_alpha_word_ratio": settings["max_non_alpha_words_ratio"],
        "stop_words": [str(word) for word in settings["stopwords"]],
    }
    repetition = {
        "max_duplicate_line_ratio": settings["dup_line_frac"] or 1.0,
        **{
            f"max_top_{n}gram_char_ratio": share for n, share in settings["top_n_grams"]
        },
        **{
            f"max_duplicate_{n}gram_char_ratio": share
            for n, share in settings["dup_n_grams"]
        },
    }
    fineweb = {
        "min_terminal_line_ratio": max(settings["line_punct_thr"], 0.0),
        "max_newline_word_ratio": settings["new_line_ratio"],
    }
    return {
        "gopher_quality": quality,
        "gopher_repetition": repetition,
        "fineweb": fineweb,
    }
