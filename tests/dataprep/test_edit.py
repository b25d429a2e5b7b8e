"""The stage `edit`: the texts of a user's function are stored as edits."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.documents import read_documents
from gristmill.dataprep.edits import apply_edits, derive_edits, edits_array
from gristmill.dataprep.user_code import edit
from gristmill.mixtures.user_code import OwnCodeError, OwnFunction, take_code
from tests.dataprep.document_shards import MakeContext
from tests.dataprep.own_steps import TEXTS, step, write_documents, written

TEXT = st.text(st.sampled_from("ab \nÄ€𝄞."), max_size=30)


@given(TEXT, TEXT)
def test_derived_edits_turn_the_old_text_into_the_new(before: str, after: str) -> None:
    edits = list(derive_edits(before, after))
    assert apply_edits(pa.array([before]), edits_array([edits])).to_pylist() == [after]
    assert (edits == []) == (before == after)


@pytest.mark.parametrize(
    ("before", "after", "edits"),
    [
        ("a colour\nhere", "a color\nhere", [(0, 9, "a color\n")]),
        ("one\ntwo\nthree\n", "one\nthree\n", [(4, 8, "")]),
        ("one\nÄÖ two\nthree", "one\nÄÖ 2\nthree", [(4, 13, "ÄÖ 2\n")]),
        ("same", "same", []),
        ("", "new", [(0, 0, "new")]),
        ("a\nb\nc\nd", "A\nb\nc\nD\ne", [(0, 2, "A\n"), (6, 7, "D\ne")]),
        ("x\n" * 2000 + "y", "x\n" * 2000 + "z", [(4000, 4001, "z")]),
        ("y\n" * 1001, "z\n" * 1000, [(0, 2002, "z\n" * 1000)]),
    ],
)
def test_edits_cover_changed_lines(
    before: str, after: str, edits: list[tuple[int, int, str]]
) -> None:
    assert list(derive_edits(before, after)) == edits


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memory", "threads", "processes"])
@pytest.mark.parametrize(
    "source",
    [
        "def step(text: str) -> str:\n    return text.replace('xyzzy', "
        "'magic').replace('nothing here', ' ')\n",
        "import pyarrow as pa, pyarrow.compute as pc\ndef step(batch: "
        "pa.RecordBatch):\n"
        "    return pc.replace_substring(pc.replace_substring(batch['text'], "
        "'xyzzy', 'magic'), 'nothing here', ' ')\n",
    ],
)
def test_later_stages_read_the_texts_of_the_function(
    tmp_path: Path, make_context: MakeContext, source: str, mode: str
) -> None:
    documents = write_documents(tmp_path / "ingest")
    config = step(tmp_path / "code", source)
    summary = edit.run(
        {"ingest": documents},
        config,
        tmp_path / "edit",
        make_context("work", mode=mode, workers=2),
    )
    read = read_documents(
        {"ingest": documents, "edit": tmp_path / "edit"}, "part-00001.parquet", ["text"]
    )
    assert read["text"].to_pylist() == [
        text.replace("xyzzy", "magic").replace("nothing here", " ") for text in TEXTS
    ]
    assert summary.counts["dropped"] == {"edit/empty": 2}
    assert summary.edits["step"] == {"documents": 6, "times": 6, "bytes": 114}
    rows = written(tmp_path / "edit")
    assert [row["bytes_removed"] for row in rows[:2]] == [31, 12]
    assert [row["bytes_added"] for row in rows[:2]] == [31, 1]


@pytest.mark.slow
def test_installed_function_can_edit(tmp_path: Path, make_context: MakeContext) -> None:
    use = take_code(OwnFunction("textwrap:shorten"), tmp_path)
    documents = write_documents(tmp_path / "ingest", shards=1)
    edit.run(
        {"ingest": documents},
        {"use": use.by_value(), "with": {"width": 20}},
        tmp_path / "edit",
        make_context("work"),
    )
    read = read_documents(
        {"ingest": documents, "edit": tmp_path / "edit"}, "part-00000.parquet", ["text"]
    )
    assert read["text"].to_pylist() == [
        "xyzzy and [...]",
        "nothing here",
        "one xyzzy more",
        "a longer text [...]",
        "ÄÖÜ €",
    ]
    assert re.fullmatch(r"textwrap:shorten \(sha256 [0-9a-f]{12}\)", use.describe())


@pytest.mark.parametrize(
    ("source", "facts"),
    [
        ("def step(text): return None", r"steps\.py, line 1: .*None"),
        ("def step(text): return 3", r"int 3"),
        (
            "import pyarrow as pa\ndef step(batch: pa.Table): return ['a']",
            r"1 texts .* 5 documents",
        ),
        (
            "import pyarrow as pa\ndef step(batch: pa.Table): return [None] * "
            "len(batch)",
            r"None",
        ),
        (
            "import pyarrow as pa\ndef step(batch: pa.Table): return 'a'",
            r"str 'a'.* array",
        ),
    ],
)
def test_return_value_that_is_not_text_ends_the_stage(
    tmp_path: Path, make_context: MakeContext, source: str, facts: str
) -> None:
    with pytest.raises(OwnCodeError, match=facts):
        edit.run(
            {"ingest": write_documents(tmp_path / "ingest")},
            step(tmp_path / "code", source),
            tmp_path / "edit",
            make_context("work"),
        )


def test_failing_oversized_and_invalid_texts_are_quarantined(
    tmp_path: Path, make_context: MakeContext
) -> None:
    source = """
def step(text):
    if "troll" in text:
        return "\\ud800"
    if "nothing" in text:
        return text * 1_000_000
    return text if "one" not in text else 1 / 0
"""
    config = step(tmp_path / "code", source, max_quarantined=0.9)
    summary = edit.run(
        {"ingest": write_documents(tmp_path / "ingest", shards=1)},
        config,
        tmp_path / "edit",
        make_context("work"),
    )
    errors = [row["error"] for row in written(tmp_path / "edit")]
    assert errors[0].startswith("UnicodeEncodeError: ")
    assert "11,999,988" in errors[1]
    assert "10,000,000" in errors[1]
    assert errors[2] == "ZeroDivisionError: division by zero (steps.py, line 7)"
    assert errors[3:] == [None, None]
    assert (summary.counts["quarantined"], summary.counts["kept"]) == (3, 2)
