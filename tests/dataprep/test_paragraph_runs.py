"""Books are split into runs of paragraphs, and no character is lost."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.core.stage_context import Context
from gristmill.dataprep.readers.ingest import run
from gristmill.dataprep.text.paragraph_runs import paragraph_runs
from gristmill.mixtures.schema.sources import Source

BODY = "The river ran past the old mill and turned its wheel all day. " * 20


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
                "word",
                "\t",
                BODY,
                "",
            ]
        )
    ),
    st.integers(1, 500),
)
def test_the_parts_joined_are_the_text(pieces: list[str], characters: int) -> None:
    text = "".join(pieces)
    assert "".join(paragraph_runs(text, characters)) == text


@pytest.mark.parametrize(
    ("split", "locators"),
    [
        (None, ["book.txt", "note.txt"]),
        ({"paragraphs": 1000}, ["book.txt#1", "book.txt#2", "note.txt#1"]),
    ],
)
def test_split_of_a_source(tmp_path: Path, split: object, locators: list[str]) -> None:
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
    assert "".join(table["text"].to_pylist()) == book + "A note."
    assert summary.counts["read"] == summary.counts["kept"] == len(locators)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"split": "sentences"}, "paragraphs: 4000"),
        ({"split": {"paragraphs": 9}, "format": "jsonl"}, "jsonl"),
        ({"split": {"paragraphs": 9}, "format": "hf"}, "format hf"),
        ({"split": {"paragraphs": 0}}, "greater than 0"),
    ],
)
def test_invalid_split_is_rejected(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Source.model_validate({"path": "x", **section})
