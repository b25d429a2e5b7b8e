"""Rules by language against datatrove's filters as FineWeb-2 configures them for each
language.
"""

from __future__ import annotations

import random
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.dataprep.filters.filter import judge
from gristmill.dataprep.langid.language_codes import parse_label
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.words.language_words import language_words
from gristmill.mixtures.steps.filter import Filter
from tests.referees.test_datatrove_gopher import RULES as GOPHER_RULES
from tests.referees.test_datatrove_web import FINEWEB_REASONS

UDHR = Path("../shared/data/langid/udhr2.zip")
NAMES = {
    "deu_Latn": "deu",
    "tha_Thai": "tha",
    "cmn_Hani": "cmn_hans",
    "rus_Cyrl": "rus",
    "fin_Latn": "fin",
    "fra_Latn": "fra",
    "ell_Grek": "ell_monotonic",
    "tur_Latn": "tur",
    "swh_Latn": "swh",
    "arb_Arab": "arb",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "deu_Latn": {
        "stopwords": ["der", "und", "die", "auf", "Recht"],
        "max_avg_word_length": 9,
        "min_avg_word_length": 4,
        "max_non_alpha_words_ratio": 0.8,
        "line_punct_thr": 0.05,
        "new_line_ratio": 0.2,
        "dup_line_frac": 0.25,
        "language_score": 0.8,
    },
    "tha_Thai": {
        "stopwords": ["และ", "ที่", "ของ", "ใน"],
        "max_avg_word_length": 7,
        "min_avg_word_length": 2,
        "max_non_alpha_words_ratio": 0.85,
        "line_punct_thr": -1,
        "new_line_ratio": 0.1,
        "dup_line_frac": 0.3,
        "language_score": 0.9,
    },
    "cmn_Hani": {
        "stopwords": ["的", "和", "有", "人人"],
        "max_avg_word_length": 3,
        "min_avg_word_length": 1,
        "max_non_alpha_words_ratio": 0.7,
        "line_punct_thr": 0.1,
        "new_line_ratio": 0.1,
        "dup_line_frac": 0.3,
        "language_score": 0.7,
    },
}
GENERAL: dict[str, dict[str, Any]] = {
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
for _settings in SETTINGS.values():
    _settings["top_n_grams"] = [[2, 0.15], [3, 0.14], [4, 0.13]]
    _settings["dup_n_grams"] = [[n, round(0.18 - 0.01 * n, 2)] for n in range(5, 11)]
REASONS = {
    **GOPHER_RULES,
    **{reason: rule.partition("/")[2] for reason, rule in FINEWEB_REASONS.items()},
}


def rules_of_settings(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
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


@pytest.fixture(scope="module", autouse=True)
def peers() -> None:
    """Import in the tests what datatrove uses for these languages; spaCy takes
    seconds.
    """
    for package in ("datatrove.pipeline.filters", "spacy", "jieba", "pythainlp"):
        pytest.importorskip(package)


def declaration(name: str) -> list[str]:
    """Read the lines of the Universal Declaration of Human Rights in one language."""
    with zipfile.ZipFile(UDHR) as archive:
        text = archive.read(f"udhr2/{name}.txt").decode("utf-8-sig")
    return [line.strip() for line in text.splitlines() if line.strip()]


def variants(lines: list[str], seed: int) -> list[str]:
    """Generate texts of one language on both sides of every rule."""
    source = random.Random(seed)
    texts = ["", " \n", lines[0]]
    for _ in range(60):
        text_lines = [source.choice(lines) for _ in range(source.randint(1, 30))]
        if source.random() < 0.4:
            text_lines += [source.choice(text_lines)] * source.randint(1, 12)
        if source.random() < 0.3:
            text_lines = [line[: source.randint(1, 12)] for line in text_lines]
        if source.random() < 0.2:
            text_lines = [f"{line} 12, 34 ... # 5%" for line in text_lines]
        if source.random() < 0.2:
            text_lines = [f"- {line.rstrip('.')}..." for line in text_lines]
        if source.random() < 0.2:
            text_lines = [re.sub(r"\w", "x", line) for line in text_lines]
        texts.append(source.choice(["\n", "\n\n", " "]).join(text_lines))
    return texts


def verdicts_of_datatrove(text: str, language: str) -> tuple[str | None, ...]:
    """Return the rule of each of FineWeb-2's three filters that drops a text, or
    None.
    """
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    settings = SETTINGS[language]
    filters = (
        GopherQualityFilter(
            language=language,
            max_avg_word_length=settings["max_avg_word_length"],
            min_avg_word_length=settings["min_avg_word_length"],
            stop_words=settings["stopwords"],
            max_non_alpha_words_ratio=settings["max_non_alpha_words_ratio"],
            min_stop_words=2,
        ),
        GopherRepetitionFilter(
            language=language,
            dup_para_frac=0,
            dup_line_char_frac=0,
            dup_para_char_frac=0,
            dup_line_frac=settings["dup_line_frac"],
            top_n_grams=settings["top_n_grams"],
            dup_n_grams=settings["dup_n_grams"],
        ),
        FineWebQualityFilter(
            language=language,
            short_line_thr=999,
            char_duplicates_ratio=0.1,
            line_punct_thr=settings["line_punct_thr"],
            new_line_ratio=settings["new_line_ratio"],
        ),
    )
    results = (
        quality_filter.filter(Document(text=text, id="0")) for quality_filter in filters
    )
    return tuple(None if result is True else REASONS[result[1]] for result in results)


@pytest.mark.skipif(not UDHR.exists(), reason="no shared data beside the checkout")
def test_verdicts_in_each_language_equal_those_of_fineweb_2() -> None:
    texts = [
        (text, language)
        for seed, language in enumerate(SETTINGS)
        for text in variants(declaration(NAMES[language]), seed)
        if text.strip()
    ]
    random.Random(1).shuffle(texts)
    codes = [parse_label(language) for _, language in texts]
    rows = pa.table(
        {
            "text": pa.array([text for text, _ in texts], pa.large_string()),
            "language": [code.code for code in codes],
            "script": [code.script for code in codes],
        }
    )
    section = Filter.model_validate(
        {
            "rules": GENERAL,
            "unlisted": "drop",
            "by_language": {
                language: rules_of_settings(settings)
                for language, settings in SETTINGS.items()
            },
        }
    )
    verdicts = judge(rows, section)
    assert not any(verdicts.errors)
    dropped: dict[str, set[str | None]] = {language: set() for language in SETTINGS}
    for number, (text, language) in enumerate(texts):
        theirs = verdicts_of_datatrove(text, language)
        dropped[language].update(theirs)
        reason = verdicts.reasons[number]
        first = next((rule for rule in theirs if rule is not None), None)
        assert (None if reason is None else reason.rpartition("/")[2]) == first, (
            language,
            text[:80],
        )
    for language, rules in dropped.items():
        assert len(rules) > 6, (
            f"{language}: more rules should drop a text, not only {rules}"
        )


@pytest.mark.skipif(not UDHR.exists(), reason="no shared data beside the checkout")
@pytest.mark.parametrize("language", NAMES)
def test_words_equal_those_of_datatrove_in_each_language(language: str) -> None:
    from datatrove.utils.text import split_into_words

    lines = declaration(NAMES[language])
    unusual_text = (
        "a.b@c.de :-) 12.5% z.B. U.S.A. o.ä. l'ami aujourd'hui 3,5 km² "
        "«x» „y“ \u00a0 IS_ALPH ... x/y well-known"
    )
    texts = [
        "",
        "\n",
        *lines[:20],
        "\n".join(lines),
        "  ".join([*lines[20:40], unusual_text]),
    ]
    language_name = str(parse_label(language))
    cuts = language_words(
        *text_buffers(pa.array([*texts, *texts], pa.large_string())),
        [language_name] * 2 * len(texts),
    )
    for number, text in enumerate([*texts, *texts]):
        place = cuts.places[number]
        bounds = slice(cuts.words.offsets[place], cuts.words.offsets[place + 1])
        spans = zip(cuts.words.starts[bounds], cuts.words.ends[bounds], strict=True)
        words = [cuts.data[begin:end].tobytes().decode() for begin, end in spans]
        assert words == split_into_words(text, language)
        np.testing.assert_array_equal(
            cuts.words.chars[bounds], [len(word) for word in words]
        )


def test_language_codes_select_the_tokenizers_of_fineweb_2_labels() -> None:
    """The column `language` has shorter codes than FineWeb-2's files, but must select
    the same tokenizer.
    """
    from datatrove.utils.word_tokenizers import load_tokenizer_assignments

    assigned = load_tokenizer_assignments()

    def tokenizer(name: str) -> tuple[Any, ...]:
        return assigned[name].args

    labels = [name for name in assigned if re.fullmatch("[a-z]{3}_[A-Z][a-z]{3}", name)]
    mismatched = []
    for label in labels:
        language = parse_label(label)
        name = str(language) if str(language) in assigned else language.code
        if name not in assigned or tokenizer(name) != tokenizer(label):
            mismatched.append(label)
    assert len(labels) > 1900
    assert len(mismatched) <= 6, (
        "labels of a macrolanguage and of its standard form in another script: "
        f"{mismatched}"
    )
    assert not {"deu_Latn", "tha_Thai", "cmn_Hani", "arb_Arab", "hin_Deva"} & set(
        mismatched
    )
