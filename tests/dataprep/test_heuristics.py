"""The heuristic quality score agrees with its plain definition."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.quality.heuristics import (
    COUNTS,
    SHORT_LINE_CHARACTERS,
    TERMINAL_MARKS,
    counts_of,
    score_counts,
)
from gristmill.dataprep.quality.heuristics import heuristic_scores as score

PROSE = (
    "The committee met on a rainy morning to talk about the repairs of the old bridge. "
    "Nobody had expected that the river would rise so early in the year, and the first "
    "proposals were withdrawn within an hour.\n"
) * 8
MENU = (
    "Home\nAbout Us\nContact\nLOGIN\nSign Up Now\n$19.99\n$29.99\nAdd To Cart\nTop "
    "10 Deals\n" * 4
)


def plain_counts(text: str) -> dict[str, int]:
    words, lines = (
        text.split(),
        [line.strip() for line in text.split("\n") if line.strip()],
    )
    solid = [character for character in text if not character.isspace()]
    letters = [character for character in solid if character.isalpha()]
    return {
        "characters": len(solid),
        "letters": len(letters),
        "capitals": sum(map(str.isupper, letters)),
        "words": len(words),
        "words_with_letters": sum(any(map(str.isalpha, word)) for word in words),
        "capitalised_words": sum(
            word[0].isalpha() and word[0].isupper() for word in words
        ),
        "lines": len(lines),
        "short_lines": sum(len(line) <= SHORT_LINE_CHARACTERS for line in lines),
        "line_characters": sum(map(len, lines)),
        "sentence_characters": sum(
            len(line) for line in lines if line[-1] in TERMINAL_MARKS
        ),
    }


def counted(texts: list[str]) -> list[dict[str, int]]:
    return [
        dict(zip(COUNTS, row, strict=True))
        for row in counts_of(pa.array(texts, pa.large_string())).tolist()
    ]


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.text(st.sampled_from("aZÉß中ⒶǅΣ09.!”。 \n\t\r\x1c\u2028\u3000𝐀😀")),
        max_size=4,
    )
)
def test_kernel_counts_equal_the_plain_definition(texts: list[str]) -> None:
    assert counted(texts) == [plain_counts(text) for text in texts]


@settings(deadline=None)
@given(st.lists(st.text(), max_size=4))
def test_score_depends_on_the_text_alone(texts: list[str]) -> None:
    scores = score(pa.array(texts, pa.large_string()))
    assert ((scores >= 0) & (scores <= 1)).all()
    assert [score(pa.array([text]))[0] for text in texts] == scores.tolist()


def test_score_of_counts_is_the_same_alone_and_in_a_batch() -> None:
    seed = 0
    counts = np.random.default_rng(seed).integers(1, 1000, (200, len(COUNTS)))
    alone = np.concatenate([score_counts(row[None]) for row in counts])
    assert alone.tolist() == score_counts(counts).tolist(), seed


def test_prose_scores_high_and_a_menu_low() -> None:
    prose, menu, nothing = score(pa.array([PROSE, MENU, " \n"])).tolist()
    assert prose > 0.9
    assert menu < 0.35
    assert nothing == 0.0


def test_score_derived_by_hand() -> None:
    # 60 words of 3 letters on one line that ends in a full stop: 60 * 3 + 59 + 1 = 240
    # characters.
    text = " ".join(["abc"] * 60) + "."
    length = (math.log(60) - math.log(20)) / (math.log(1000) - math.log(20))
    letters = min(1.0, (180 / 181 - 0.7) / 0.27)
    assert counted([text])[0]["sentence_characters"] == 240
    assert score(pa.array([text]))[0] == pytest.approx(
        (length + 1 + 1 + 1 + 1 + letters + 1 + 1) / 8
    )
    assert np.isnan(score(pa.array([text]))).sum() == 0
