"""Books are split into chapters or runs of paragraphs, and no character is lost."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.core.stage_context import Context
from gristmill.dataprep.readers.ingest import run
from gristmill.dataprep.text.chapters import (
    LEAST_CHAPTER,
    chapters,
    heading_of,
    paragraph_runs,
)
from gristmill.mixtures.sections.sources import Source

BODY = "The river ran past the old mill and turned its wheel all day. " * 20
HEADINGS = (
    "CHAPTER I",
    "Chapter 12: Of the Mill",
    "Chapter the First",
    "BOOK THE FIRST.",
    "Kapitel 3",
    "Erstes Kapitel",
    "Chapitre premier",
    "CAPÍTULO II",
    "Глава первая",
    "XIV.",
    "Epilogue",
    "## A heading",
    "CHAPTER IV THE WHEEL TURNS",
    "第三回 風車",
    "Letter Twenty-One",
    "ACT III",
)


@pytest.mark.parametrize("heading", HEADINGS)
def test_chapter_begins_at_a_heading_and_text_before_it_is_a_part(heading: str) -> None:
    text = (
        "The title\n\nby somebody. "
        f"{BODY}\n\n\n{heading}\n\n{BODY}\n\n{heading}\n{BODY}"
    )
    first, second, third = chapters(text)
    assert (heading_of(first), heading_of(second), heading_of(third)) == (
        None,
        heading,
        heading,
    )
    assert first + second + third == text


@pytest.mark.parametrize(
    "line",
    [
        "Part of the reason was the mill.",
        "I",
        "Chapter and verse were given.",
        "12",
        "The first chapter was short.",
        f"Chapter I: {'a long line ' * 9}",
        "Book a room",
    ],
)
def test_line_of_prose_is_not_a_heading(line: str) -> None:
    text = f"{BODY}\n\n{line}{' went to the mill.' if line == 'I' else ''}\n\n{BODY}"
    assert chapters(text) == [text]


def test_heading_needs_a_blank_line_before_it() -> None:
    text = f"{BODY}\nCHAPTER I\n{BODY}"
    assert chapters(text) == [text]


def test_consecutive_headings_begin_one_chapter() -> None:
    contents = "".join(f"Chapter {number}\n\n" for number in range(1, 9))
    text = (
        f"{contents}{BODY}\n\nPART II\n\nCHAPTER I\n\n{BODY}\n\nTHE "
        "END\n\nEpilogue\n\nShort."
    )
    first, second = chapters(text)
    assert (heading_of(first), heading_of(second)) == ("Chapter 1", "PART II")
    assert second.endswith("Epilogue\n\nShort."), (
        "what is too short stays with what comes before"
    )
    assert len(first) >= LEAST_CHAPTER


def test_paragraphs_are_joined_until_a_document_has_its_characters() -> None:
    paragraphs = [f"{number} {'word ' * 10}\n\n" for number in range(10)]
    joined = [
        "".join(paragraphs[begin:end]) for begin, end in ((0, 3), (3, 6), (6, 10))
    ]
    assert paragraph_runs("".join(paragraphs), 120) == joined, (
        "the last one is too short to stand alone"
    )
    assert paragraph_runs("one\n\ntwo", 1000) == ["one\n\ntwo"]


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(
            [
                "\n",
                "\n\n",
                "\r\n\r\n",
                " ",
                "Chapter I",
                "word",
                "\t",
                "II.",
                BODY,
                "",
                "# A",
            ]
        )
    ),
    st.integers(1, 500),
)
def test_the_parts_joined_are_the_text(pieces: list[str], characters: int) -> None:
    text = "".join(pieces)
    assert "".join(chapters(text)) == text
    assert "".join(paragraph_runs(text, characters)) == text


@pytest.mark.parametrize(
    ("split", "locators", "headings"),
    [
        (None, ["book.txt", "note.txt"], ["{}", "{}"]),
        (
            "chapters",
            ["book.txt#1", "book.txt#2", "note.txt#1"],
            ['{"heading": "CHAPTER I"}', '{"heading": "CHAPTER II"}', "{}"],
        ),
        ({"paragraphs": 1000}, ["book.txt#1", "book.txt#2", "note.txt#1"], ["{}"] * 3),
    ],
)
def test_split_of_a_source(
    tmp_path: Path, split: object, locators: list[str], headings: list[str]
) -> None:
    book = f"CHAPTER I\n\n{BODY}\n\nCHAPTER II\n\n{BODY}"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "book.txt").write_text(book)
    (tmp_path / "in" / "note.txt").write_text("A note.")
    (tmp_path / "out").mkdir()
    source = {"path": str(tmp_path / "in"), "split": split}
    summary = run(
        {}, {"sources": {"books": source}}, tmp_path / "out", Context(tmp_path / "work")
    )
    table = pq.read_table(next((tmp_path / "out").glob("part-*.parquet")))
    assert table["locator"].to_pylist() == locators
    assert table["metadata"].to_pylist() == headings
    assert "".join(table["text"].to_pylist()) == book + "A note."
    assert summary.counts["read"] == summary.counts["kept"] == len(locators)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"split": "sentences"}, "`chapters`"),
        ({"split": "chapters", "format": "jsonl"}, "jsonl"),
        ({"split": {"paragraphs": 9}, "format": "hf"}, "rows"),
        ({"split": {"paragraphs": 0}}, "greater than 0"),
    ],
)
def test_invalid_split_is_rejected(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Source.model_validate({"path": "x", **section})
