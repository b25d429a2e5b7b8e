"""Edits change what is read, never what is stored."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    annotate,
    document_id,
    kept_rows,
    read_documents,
    write_table,
)
from gristmill.dataprep.edits import (
    BadEditError,
    apply_edits,
    cuts_array,
    edits_array,
    size_changes,
)


def in_plain_python(text: str, edits: list[tuple[int, int, str]]) -> str:
    data = text.encode()
    for begin, end, new in reversed(edits):
        data = data[:begin] + new.encode() + data[end:]
    return data.decode()


@st.composite
def edited(draw: st.DrawFn) -> tuple[str, list[tuple[int, int, str]]]:
    text = draw(st.text(max_size=30))
    borders = [0, *np.cumsum([len(char.encode()) for char in text]).tolist()]
    borders_of_edits = sorted(
        draw(st.lists(st.sampled_from(borders), max_size=8, unique=True))
    )
    pairs = list(zip(borders_of_edits[::2], borders_of_edits[1::2]))
    return text, [(begin, end, draw(st.text(max_size=5))) for begin, end in pairs]


@settings(deadline=None)
@given(st.lists(edited(), max_size=6))
def test_edits_equal_slicing_in_plain_python(
    cases: list[tuple[str, list[tuple[int, int, str]]]],
) -> None:
    texts = pa.array([text for text, _ in cases], pa.large_string())
    edits = edits_array([edits for _, edits in cases])
    expected = [in_plain_python(text, edits) for text, edits in cases]
    assert apply_edits(texts, edits).to_pylist() == expected
    grown = [
        len(new.encode()) - len(old.encode()) for new, (old, _) in zip(expected, cases)
    ]
    assert size_changes(edits).tolist() == grown


def test_cuts_are_edits_without_a_replacement() -> None:
    cuts = cuts_array(np.array([0, 4]), np.array([2, 5]), np.array([0, 1, 1, 2]))
    assert apply_edits(pa.array(["abc", "def", "ghijkl"]), cuts).to_pylist() == [
        "c",
        "def",
        "ghijl",
    ]


def test_null_list_of_edits_changes_nothing() -> None:
    edits = edits_array([[(0, 1, "")], [(0, 1, "x")]]).take(
        pa.array([0, None, 1], pa.int64())
    )
    assert apply_edits(pa.array(["ab", "cd", "ef"]), edits).to_pylist() == [
        "b",
        "cd",
        "xf",
    ]
    assert size_changes(edits).tolist() == [-1, 0, 0]


@pytest.mark.parametrize(
    "edits", [[(0, 3, "")], [(1, 0, "")], [(0, 2, ""), (1, 2, "")]]
)
def test_overlapping_or_out_of_range_edits_are_rejected(
    edits: list[tuple[int, int, str]],
) -> None:
    with pytest.raises(BadEditError, match="document 0 of 1"):
        apply_edits(pa.array(["ab"]), edits_array([edits]))


def test_documents_are_read_with_the_edits_of_earlier_stages(
    tmp_path: Path,
) -> None:
    texts = ["one two", "three", "four"]
    ids = [document_id("web", str(row), text) for row, text in enumerate(texts)]
    source = pa.array(["web"] * 3).dictionary_encode()
    documents = pa.table(
        [
            pa.array(ids, pa.binary(16)),
            source,
            pa.array(["0", "1", "2"]),
            pa.array(texts, pa.large_string()),
            pa.array(["{}"] * 3),
        ],
        schema=DOCUMENT_SCHEMA,
    )
    write_table(tmp_path / "ingest" / "part-00000-000.parquet", documents)
    rows = np.arange(3)
    first, counts = annotate(
        documents,
        rows,
        rows,
        [None, "short", None],
        {"edits": edits_array([[(0, 4, "")], [], [(4, 4, "ty")]])},
    )
    assert (counts["bytes_read"], counts["bytes_kept"]) == (16, 3 + 6)
    write_table(tmp_path / "clean" / "part-00000-000.parquet", first)
    inputs = {"ingest": tmp_path / "ingest", "clean": tmp_path / "clean"}
    read = read_documents(inputs, "part-00000-000.parquet")
    assert read["text"].to_pylist() == ["two", "three", "fourty"]
    assert kept_rows(inputs, "part-00000-000.parquet").tolist() == [0, 2]
    kept = kept_rows(inputs, "part-00000-000.parquet")
    second, _ = annotate(
        read, kept, kept, [None, None], {"edits": edits_array([[(0, 1, "T")], []])}
    )
    write_table(tmp_path / "decontaminate" / "part-00000-000.parquet", second)
    inputs["decontaminate"] = tmp_path / "decontaminate"
    assert read_documents(inputs, "part-00000-000.parquet", ["text"])[
        "text"
    ].to_pylist() == ["Two", "three", "fourty"]
