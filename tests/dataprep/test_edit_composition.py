"""Composition of two rounds of edits."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.edits import Edit, apply_edits, edits_array, then


def apply(text: str, edits: list[Edit]) -> str:
    result: str = apply_edits(
        pa.array([text], pa.large_string()), edits_array([edits])
    ).to_pylist()[0]
    return result


@st.composite
def rounds(draw: st.DrawFn) -> tuple[str, list[Edit], list[Edit]]:
    text = draw(st.text("abcdefghij", max_size=12))
    first = draw(some_edits(len(text), "XYZ"))
    return text, first, draw(some_edits(len(apply(text, first)), "123"))


@st.composite
def some_edits(draw: st.DrawFn, length: int, letters: str) -> list[Edit]:
    places = sorted(draw(st.lists(st.integers(0, length), max_size=8)))
    pairs = list(zip(places[::2], places[1::2], strict=False))
    return [(begin, end, draw(st.text(letters, max_size=3))) for begin, end in pairs]


@pytest.mark.slow
@given(st.lists(rounds(), max_size=4))
@settings(deadline=None, max_examples=150)
def test_composed_edits_equal_both_rounds_in_turn(
    cases: list[tuple[str, list[Edit], list[Edit]]],
) -> None:
    texts = pa.array([text for text, _, _ in cases], pa.large_string())
    first, second = (
        edits_array([case[1] for case in cases]),
        edits_array([case[2] for case in cases]),
    )
    composed = then(first, second)
    assert apply_edits(texts, composed).equals(
        apply_edits(apply_edits(texts, first), second)
    )


def test_composing_edits_inside_and_across_replacements() -> None:
    text = "0123456789"
    first = [(2, 4, "abcd"), (6, 7, "xyz")]  # 01abcd45xyz789
    inside, across = [(3, 4, "-")], [(4, 10, "_")]
    assert then(edits_array([first]), edits_array([inside])).to_pylist()[0] == [
        {"begin": 2, "end": 4, "text": "a-cd"},
        {"begin": 6, "end": 7, "text": "xyz"},
    ]
    assert then(edits_array([first]), edits_array([across])).to_pylist()[0] == [
        {"begin": 2, "end": 7, "text": "ab_z"}
    ]
    assert apply(text, [(2, 7, "ab_z")]) == "01ab_z789"
