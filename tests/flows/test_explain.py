"""Edits and whole texts in the output of `explain`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.flows.pages.terminal_pages import print_parts
from gristmill.flows.questions.explain import (
    Edit,
    Edits,
    EditSpan,
    Explanation,
    Judgement,
    TextPiece,
    describe_edits,
    edited,
    marked_text,
)


def test_edits_are_shown_in_the_text_that_their_stage_saw(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "Écrivez à bob@mail.org. Menu".encode()
    first: list[EditSpan] = [
        {"begin": 0, "end": 9, "text": ""},
        {"begin": 12, "end": 24, "text": "<EMAIL>"},
    ]
    cleaned = describe_edits(text, first)
    assert cleaned == Edits(
        number=2,
        bytes_removed=21,
        bytes_added=7,
        first=[Edit("Écrivez ", ""), Edit("bob@mail.org", "<EMAIL>")],
    )
    second: list[EditSpan] = [{"begin": 3, "end": 10, "text": "you"}]
    later = describe_edits(edited(text, first), second)
    assert later.first == [Edit("<EMAIL>", "you")]
    assert edited(edited(text, first), second).decode() == "à you. Menu"
    print_parts(Judgement("clean", True, None, {}, edits=cleaned).parts())
    printed = capsys.readouterr().out
    assert "edits: 2, 21 bytes removed, 7 added" in printed
    assert "[-Écrivez -]" in printed


@given(st.data())
def test_marked_text_contains_the_original_and_every_edited_text(
    data: st.DataObject,
) -> None:
    original = data.draw(st.text("abcdefgh", max_size=30))
    text = original.encode()
    stages: dict[str, list[EditSpan]] = {}
    for stage in ("clean", "dedup_lines", "decontaminate"):
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
        stages[stage] = [
            {"begin": begin, "end": end, "text": data.draw(st.text("XYZ", max_size=3))}
            for begin, end in zip(cuts[::2], cuts[1::2], strict=False)
        ]
        text = edited(text, stages[stage])
    pieces = marked_text(original.encode(), stages)
    edited_pieces = [piece.text for piece in pieces if piece.edit != "removed"]
    original_pieces = [piece.text for piece in pieces if piece.edit != "added"]
    assert "".join(edited_pieces).encode() == text
    assert "".join(original_pieces) == original
    assert all(piece.stage in stages for piece in pieces if piece.edit)


def test_text_edits_are_printed_as_a_word_diff(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pieces = [
        TextPiece("[bold] mail "),
        TextPiece("a@b.org", "removed", "clean"),
        TextPiece("<EMAIL>", "added", "clean"),
        TextPiece(" now"),
    ]
    place = ("web", "a#1", None, 19, "", "part-0", 1)
    Explanation("ab", *place, [], "kept", pieces).show()
    printed = capsys.readouterr().out
    assert "[bold] mail [-a@b.org-]{+<EMAIL>+} now\n" in printed


def test_rules_without_edits_are_omitted() -> None:
    values = {
        "clean_words": 0,
        "clean_fix_unicode": 0,
        "clean_email": 2,
        "removed_word_ratio": 0.0,
        "words": 0,
    }
    telling = Judgement("clean", False, "clean/empty", values).telling_values()
    assert values.keys() - telling.keys() == {"clean_fix_unicode"}
