"""Rules that separate running English from placeholder text and shuffled words."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dataprep.kinds_kept import kept_share
from benchmarks.dataprep.text_kinds import KINDS, documents
from gristmill.dataprep.filters.running_text import (
    DETERMINERS,
    FUNCTION_WORDS,
    LEAST_DETERMINERS,
    NEVER_NEXT,
    measure,
)
from gristmill.flows.authoring.new_manifest import PROSE_RULES
from gristmill.mixtures.steps.rules import Rules, RunningText, expand
from tests.dataprep import rules_reference, word_cuts_reference

PIECES = [
    "The ",
    "the ",
    "a ",
    "of ",
    "dog",
    " dog ",
    "in",
    "-",
    "in-",
    "\n",
    "1. ",
    "- 20 ",
    "= 3 ",
    "é ",
    ". ",
    " 7 ",
    "LOREM ipsum",
]


def measured(texts: list[str], language: str | None = "en") -> list[dict[str, float]]:
    columns = measure(
        pa.table(
            {
                "text": pa.array(texts, pa.large_string()),
                "language": pa.array([language] * len(texts), pa.string()),
            }
        ),
        RunningText(),
    )
    return [
        {name: values[row].item() for name, values in columns.items()}
        for row in range(len(texts))
    ]


def lettered_share(text: str) -> float:
    """`lettered_word_ratio` of one text."""
    lettered = unlettered = 0
    for line in text.split("\n"):
        has_letter = [any(map(str.isalpha, word)) for word in line.split()]
        first = has_letter.index(True) if True in has_letter else len(has_letter)
        counted = has_letter[min(first, 2) :]
        unlettered_in_line = counted.count(False)
        lettered += counted.count(True)
        unlettered += (
            0
            if "=" in line or unlettered_in_line <= counted.count(True)
            else unlettered_in_line
        )
    return lettered / (lettered + unlettered) if lettered + unlettered else math.nan


def stray_share(text: str) -> float:
    """`stray_determiner_ratio` of one text, by the positions of its words."""
    words, at = [], 0
    for word in word_cuts_reference.segmented(text):
        at = text.index(word, at)
        words.append((at, word))
        at += len(word)
    followed = stray = 0
    for (start, word), (next_start, following) in pairwise(words):
        between = text[start + len(word) : next_start]
        if word.lower() in DETERMINERS and between in (" ", "\n"):
            followed += 1
            is_compound = text[next_start + len(following) :].startswith("-")
            stray += following.lower() in NEVER_NEXT and not is_compound
    return stray / followed if followed >= LEAST_DETERMINERS else math.nan


def plain(text: str) -> dict[str, float]:
    """Statistics of one English text in plain Python."""
    words = word_cuts_reference.segmented(text)
    mini = sum(len(word) <= 3 for word in words)
    functions = sum(word.lower() in FUNCTION_WORDS for word in words)
    return {
        "placeholder_phrases": len(
            re.findall("lorem ipsum", text, re.IGNORECASE | re.ASCII)
        ),
        "lettered_word_ratio": lettered_share(text),
        "eflaw": (len(words) + mini) / max(rules_reference.sentences(text), 1)
        if words
        else math.nan,
        "function_word_ratio": functions / len(words) if words else math.nan,
        "stray_determiner_ratio": stray_share(text),
    }


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
        min_size=1,
        max_size=3,
    )
)
def test_kernels_agree_with_the_plain_definitions(texts: list[str]) -> None:
    for text, values in zip(texts, measured(texts), strict=True):
        assert values == pytest.approx(plain(text), abs=0, rel=1e-12, nan_ok=True)


def test_list_markers_arithmetic_and_numbers_do_not_lower_the_letter_ratio() -> None:
    lists = "1. Mix it.\n- 200 g flour\n• 3 eggs\n(a) Stir.\n2 ) Bake."
    rows = measured([lists, "8 * 9 = 72\nso it is 72 .", "in 1969 , 3 men flew"])
    assert [row["lettered_word_ratio"] for row in rows] == [1.0] * 3
    assert measured(["lamp | 3 | 4\nboat | 5 | 6"])[0]["lettered_word_ratio"] == 2 / 10


def test_other_languages_have_only_placeholder_and_letter_statistics() -> None:
    values = measured(["Lorem ipsum dolor sit amet 1 2 3"], "la")[0]
    assert (values["placeholder_phrases"], values["lettered_word_ratio"]) == (1, 1.0)
    assert all(
        math.isnan(values[name])
        for name in ("eflaw", "function_word_ratio", "stray_determiner_ratio")
    )


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind.name != "Markov text"],
    ids=lambda kind: kind.name,
)
def test_most_texts_of_a_kind_get_the_intended_verdict(kind: object) -> None:
    share = kept_share(
        documents(kind, 20), Rules.model_validate(expand(list(PROSE_RULES)))
    )  # type: ignore[arg-type]
    assert (share > 0.5) == kind.keep  # type: ignore[attr-defined]
