"""Stop words of many languages, and Gopher verdicts on the same text in each."""

from __future__ import annotations

import importlib
import math
import re
import zipfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from gristmill.dataprep.filters import gopher
from gristmill.dataprep.filters.gopher_words import (
    STOP_WORDS,
    UNSPACED_LANGUAGES,
    is_unspaced,
    language_index,
)
from gristmill.dataprep.langid.language_codes import short_code
from gristmill.dataprep.thresholds import failures
from gristmill.mixtures.steps.rules import GopherQuality, GopherRepetition, GopherRules
from tests.dataprep import repetition_reference, word_cuts_reference

UDHR = Path("../shared/data/langid/udhr2.zip")
CHINESE = "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。"


def test_stop_word_lists_are_distinct_lower_case_and_fit_the_kernel() -> None:
    assert len(STOP_WORDS) > 50
    assert STOP_WORDS["en"] == ("the", "be", "to", "of", "and", "that", "have", "with")
    for language, words in STOP_WORDS.items():
        assert 8 <= len(set(words)) < 64, language
        assert all(word == word.lower() and 0 < len(word) < 64 for word in words), (
            language
        )


@pytest.mark.referee
def test_nine_in_ten_stop_words_are_spacys() -> None:
    pytest.importorskip("spacy")
    shared = total = 0
    for language, words in STOP_WORDS.items():
        name = {"no": "nb"}.get(language, language)
        try:
            theirs = importlib.import_module(f"spacy.lang.{name}.stop_words").STOP_WORDS
        except ModuleNotFoundError:
            continue
        if len(theirs) > 50:
            shared += sum(word in theirs for word in words)
            total += len(words)
    assert shared > 0.9 * total > 400


def test_languages_are_known_by_model_labels_and_aliases() -> None:
    assert language_index(None) == language_index("en") == language_index("eng_Latn")
    assert language_index("nb") == language_index("no")
    assert language_index("wuu") == language_index("cmn_Hans") == language_index("zh")
    assert language_index("xx") == -1
    assert [is_unspaced(language) for language in ("tha_Thai", "zh", "ko", None)] == [
        True,
        True,
        False,
        False,
    ]


def measured(
    text: str, spoken: str | None, language: str = "auto", **options: str
) -> dict[str, float]:
    counting = GopherRules.model_validate({"language": language, **options})
    columns = gopher.statistics(pa.array([text]), counting, [spoken])
    return {name: values[0].item() for name, values in columns.items()}


def test_document_language_selects_the_stop_words() -> None:
    text = "Der Hund und die Katze sind in dem Haus"
    assert measured(text, "de")["stop_words"] == 4  # Der und die in
    assert measured(text, "en")["stop_words"] == measured(text, None)["stop_words"] == 0
    assert measured(text, "en", "de")["stop_words"] == 4
    assert measured(text, "de", dialect="dolma")["stop_words"] == 3  # und die in
    assert measured("die die und", "de", dialect="datatrove")["stop_words"] == 2


def test_custom_stop_words_replace_those_of_the_language() -> None:
    text = pa.array(
        ["Der Hund und die Katze mögen Straßenbahnhaltestellen", "the end of it"]
    )
    for dialect, stop_words, expected in (
        ("dclm", ("Hund", "straßenbahnhaltestellen", "the"), [2, 1]),
        ("dolma", ("Hund", "katze"), [1, 0]),
        ("datatrove", ("und", "und", "die"), [2, 0]),
        ("redpajama", ("of",), [0, 1]),
    ):
        counting = GopherQuality.model_validate({"dialect": dialect})
        columns = gopher.statistics(text, counting, ["xx", "de"], stop_words=stop_words)
        assert columns["stop_words"].tolist() == expected, dialect
    with pytest.raises(ValidationError, match="at most 63"):
        GopherQuality.model_validate(
            {"stop_words": [f"w{number}" for number in range(64)]}
        )


def test_language_without_a_list_has_no_stop_word_verdict() -> None:
    values = measured("ein zwei drei", "xx")
    assert math.isnan(values["stop_words"])
    assert values["words"] == 3
    failed = failures(
        {name: np.array([value]) for name, value in values.items()},
        {"q": GopherQuality(min_words=1)},
    )
    assert not failed["q/min_stop_words"].any()


def test_chinese_characters_are_words_without_a_mean_length() -> None:
    for values in (measured(CHINESE, "zh"), measured(CHINESE, None, words="unicode")):
        assert values["words"] == sum(character.isalpha() for character in CHINESE)
        assert math.isnan(values["mean_word_length"])
    assert measured(CHINESE, "zh")["stop_words"] == 5  # 在 和 有 和 的
    assert measured(CHINESE, None)["words"] == 1


@pytest.mark.parametrize("dialect", gopher.DIALECTS)
def test_chinese_ngrams_count_two_characters_per_word(dialect: str) -> None:
    text = CHINESE * 2 + "世界"
    cut = {"redpajama": word_cuts_reference.normalized}.get(dialect, str)
    words = word_cuts_reference.unspaced(cut(text))
    expected = repetition_reference.repetition(text, dialect, words, per_word=2)
    values = measured(text, "zh", dialect=dialect)
    for name, value in expected.items():
        assert values[name] == value or (
            math.isnan(values[name]) and math.isnan(value)
        ), name
    assert values["duplicate_10gram_char_ratio"] > 0.1


@lru_cache(maxsize=1)
def declarations() -> dict[str, list[str]]:
    """Passages of the Universal Declaration of Human Rights in each language that has a
    stop-word list.
    """
    passages_of_language: dict[str, list[str]] = {}
    with zipfile.ZipFile(UDHR) as archive:
        for name in sorted(archive.namelist()):
            language = short_code(re.split(r"[/._-]", name)[1])
            if language not in passages_of_language and (
                language in STOP_WORDS or language in UNSPACED_LANGUAGES
            ):
                passages_of_language[language] = passages(archive.read(name).decode())
    return passages_of_language


def passages(text: str) -> list[str]:
    complete, passage = [], ""
    for line in filter(None, map(str.strip, text.split("\n"))):
        passage += line + "\n"
        if len(passage.encode()) > 900:
            complete.append(passage)
            passage = ""
    return complete


def keep_rates(
    language: str | None, rules: GopherQuality | GopherRepetition
) -> dict[str, float]:
    rates = {}
    for spoken, texts in declarations().items():
        columns = gopher.statistics(
            pa.array(texts), rules, [language or spoken] * len(texts)
        )
        rates[spoken] = float(
            1 - np.any(list(failures(columns, {"": rules}).values()), axis=0).mean()
        )
    return rates


@pytest.mark.skipif(not UDHR.exists(), reason="the shared data is not here")
def test_declaration_of_human_rights_is_kept_by_the_rules_of_its_language() -> None:
    own_rules, english_rules = (
        keep_rates(None, GopherQuality()),
        keep_rates("en", GopherQuality()),
    )
    assert sum(rate >= 0.9 for rate in own_rules.values()) >= 58
    assert {language for language, rate in english_rules.items() if rate >= 0.9} == {
        "en"
    }
    assert all(
        own_rules[language] >= 0.9 for language in ("zh", "ja", "th", "lo", "km", "my")
    )


@pytest.mark.skipif(not UDHR.exists(), reason="the shared data is not here")
def test_unspaced_scripts_are_not_more_repetitive() -> None:
    rates = keep_rates(None, GopherRepetition())
    assert all(
        rates[language] >= 0.9
        for language in ("en", "zh", "ja", "th", "lo", "km", "my")
    )
