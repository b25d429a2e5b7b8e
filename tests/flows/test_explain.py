"""Edits and whole texts in the output of `explain`."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    annotate,
    document_id,
    read_documents,
    write_table,
)
from gristmill.dataprep.edits import edits_array
from gristmill.flows.questions.explain import (
    Edit,
    Edits,
    EditSpan,
    Judgement,
    TextPiece,
    describe_edits,
    marked_text,
    print_text,
)
from gristmill.flows.running.terminal import plain_console

SHARD = "part-0.parquet"


def test_edits_are_shown_in_the_text_that_their_stage_saw(tmp_path: Path) -> None:
    text = "Écrivez à bob@mail.org. Menu"
    documents = pa.table(
        [
            pa.array([document_id("web", "0", text)], pa.binary(16)),
            pa.array(["web"]).dictionary_encode(),
            pa.array(["0"]),
            pa.array([text], pa.large_string()),
            pa.array(["{}"]),
        ],
        schema=DOCUMENT_SCHEMA,
    )
    inputs = {"ingest": tmp_path / "ingest"}
    write_table(inputs["ingest"] / SHARD, documents)
    rows = np.array([0])
    for stage, edits in (
        ("clean", [(0, 9, ""), (12, 24, "<EMAIL>")]),
        ("decontaminate", [(3, 10, "you")]),
    ):
        stage_documents = read_documents(inputs, SHARD)
        table, _ = annotate(
            stage_documents, rows, rows, [None], {"edits": edits_array([edits])}
        )
        inputs[stage] = tmp_path / stage
        write_table(inputs[stage] / SHARD, table)
    assert read_documents(inputs, SHARD)["text"].to_pylist() == ["à you. Menu"]
    cleaned = describe_edits(
        inputs,
        "clean",
        SHARD,
        0,
        [
            {"begin": 0, "end": 9, "text": ""},
            {"begin": 12, "end": 23, "text": "<EMAIL>"},
        ],
    )
    assert cleaned == Edits(
        number=2,
        bytes_removed=20,
        bytes_added=7,
        first=[Edit("Écrivez ", ""), Edit("bob@mail.or", "<EMAIL>")],
    )
    later = describe_edits(
        inputs, "decontaminate", SHARD, 0, [{"begin": 3, "end": 10, "text": "you"}]
    )
    assert later.first == [Edit("<EMAIL>", "you")]
    lines = Judgement("clean", True, None, {}, edits=cleaned).lines()
    assert lines[0] == "edits: 2, 20 bytes removed, 7 added"
    assert lines[1] == "  'Écrivez ' -> (nothing)"


def edited(text: bytes, edits: list[EditSpan]) -> bytes:
    for edit in sorted(edits, key=lambda edit: edit["begin"], reverse=True):
        text = text[: edit["begin"]] + edit["text"].encode() + text[edit["end"] :]
    return text


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
    table = pa.chunked_array([pa.array([original])])
    with patch(
        "gristmill.flows.questions.explain.read_document_rows",
        lambda *where: {"text": table},
    ):
        pieces = marked_text({"ingest": Path("x")}, "part-0.parquet", 0, stages)
    edited_pieces = [piece.text for piece in pieces if piece.edit != "removed"]
    original_pieces = [piece.text for piece in pieces if piece.edit != "added"]
    assert "".join(edited_pieces).encode() == text
    assert "".join(original_pieces) == original
    assert all(piece.stage in stages for piece in pieces if piece.edit)


def test_text_edits_are_printed_as_a_word_diff(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_text(
        plain_console(),
        [
            TextPiece("[bold] mail "),
            TextPiece("a@b.org", "removed", "clean"),
            TextPiece("<EMAIL>", "added", "clean"),
            TextPiece(" now"),
        ],
    )
    assert capsys.readouterr().out.splitlines()[1:] == [
        "the whole text; [-removed-] and {+added+} by clean",
        "[bold] mail [-a@b.org-]{+<EMAIL>+} now",
    ]


def test_rules_without_edits_are_omitted() -> None:
    values = {
        "clean_words": 0,
        "clean_fix_unicode": 0,
        "clean_email": 2,
        "removed_word_ratio": 0.0,
        "words": 0,
    }
    assert Judgement("clean", False, "clean/empty", values).lines() == [
        "clean_words 0, clean_email 2, removed_word_ratio 0, words 0"
    ]
