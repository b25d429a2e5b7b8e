"""Document and annotation tables: ids are content, rows stay aligned, and every document is counted once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.counts import (
    ConservationError,
    QuarantineError,
    add_counts,
    check_conservation,
    check_quarantine,
)
from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    MisalignedError,
    annotate,
    document_id,
    judged_rows,
    kept_rows,
    read_annotations,
    write_table,
)


def documents(texts: list[str], sources: list[str]) -> pa.Table:
    rows = [{"id": document_id(source, str(n), text), "source": source, "locator": str(n), "text": text,
             "metadata": "{}"} for n, (text, source) in enumerate(zip(texts, sources, strict=True))]
    return pa.Table.from_pylist(rows, DOCUMENT_SCHEMA)


@given(st.lists(st.tuples(*[st.text()] * 3), min_size=2, max_size=2, unique=True))
def test_documents_that_differ_in_anything_have_different_ids(pair: list[tuple[str, str, str]]) -> None:
    def storable(parts: tuple[str, str, str]) -> bool:
        return not any("\ud800" <= character <= "\udfff" for part in parts for character in part)

    if all(map(storable, pair)):
        assert document_id(*pair[0]) != document_id(*pair[1])


def test_moving_a_character_from_one_part_to_the_next_changes_the_id() -> None:
    assert document_id("ab", "c", "d") != document_id("a", "bc", "d")


def test_annotations_hold_a_verdict_for_judged_rows_and_pass_the_others(tmp_path: Path) -> None:
    table = documents(["aa", "b", "cccc", "d"], ["x", "x", "y", "x"])
    rows = np.array([0, 2, 3])
    judged = judged_rows(table, rows, ["x"])
    assert judged.tolist() == [0, 3]
    made, counts = annotate(table, rows, judged, [None, "too_short"], {"size": pa.array([2, 1])})
    assert made["keep"].to_pylist() == [True, None, True, False]
    assert made["reason"].to_pylist() == [None, None, None, "too_short"]
    assert made["size"].to_pylist() == [2, None, None, 1]
    assert counts["read"] == 3
    assert counts["kept"] == 2
    assert counts["dropped"] == {"too_short": 1}
    assert (counts["bytes_read"], counts["bytes_kept"]) == (7, 6)
    assert counts["sources"]["y"]["kept"] == 1
    check_conservation(counts, "toy")


def test_a_document_with_an_error_is_quarantined_whatever_its_verdict_was() -> None:
    table = documents(["a", "b"], ["x", "x"])
    both = np.array([0, 1])
    made, counts = annotate(table, both, both, [None, "rule"], {}, ["it broke", None])
    assert made["keep"].to_pylist() == [False, False]
    assert made["error"].to_pylist() == ["it broke", None]
    assert (counts["quarantined"], counts["dropped"]) == (1, {"rule": 1})


def test_rows_are_kept_if_every_stage_kept_them(tmp_path: Path) -> None:
    table = documents(["a", "b", "c"], ["x"] * 3)
    every = np.arange(3)
    inputs = {"ingest": tmp_path / "ingest", "filter": tmp_path / "filter", "dedup": tmp_path / "dedup"}
    write_table(inputs["ingest"] / "part-0.parquet", table)
    write_table(inputs["filter"] / "part-0.parquet", annotate(table, every, every, [None, "r", None], {})[0])
    left = np.array([0, 2])
    write_table(inputs["dedup"] / "part-0.parquet", annotate(table, left, left, ["r", None], {})[0])
    assert kept_rows({"ingest": inputs["ingest"]}, "part-0.parquet").tolist() == [0, 1, 2]
    assert kept_rows(inputs, "part-0.parquet").tolist() == [2]


def test_annotations_of_other_documents_are_an_error_and_never_a_silent_misalignment(tmp_path: Path) -> None:
    table = documents(["a", "b"], ["x", "x"])
    inputs = {"ingest": tmp_path / "ingest", "filter": tmp_path / "filter"}
    every = np.arange(2)
    write_table(inputs["ingest"] / "part-0.parquet", table)
    write_table(inputs["filter"] / "part-0.parquet", annotate(table, every, every, [None, None], {})[0].take([1, 0]))
    with pytest.raises(MisalignedError, match="gristmill stage filter"):
        read_annotations(inputs, "part-0.parquet", "filter")


def test_counts_add_up_in_any_order() -> None:
    parts = [{"read": 2, "dropped": {"a": 1}}, {"read": 1, "dropped": {"a": 1, "b": 3}}, {"read": 4}]
    assert add_counts(parts) == add_counts(reversed(parts)) == {"read": 7, "dropped": {"a": 2, "b": 3}}


def test_a_lost_document_fails_the_stage_and_names_the_source() -> None:
    good = {"read": 2, "kept": 1, "dropped": {"r": 1}, "quarantined": 0}
    check_conservation({**good, "sources": {"x": good}}, "toy")
    with pytest.raises(ConservationError, match="toy: x: 3 documents were read but 2 are accounted for"):
        check_conservation({**good, "sources": {"x": {**good, "read": 3}}}, "toy")


def test_more_quarantine_than_allowed_fails_the_stage() -> None:
    check_quarantine({"read": 100, "quarantined": 5}, 0.05, "toy")
    with pytest.raises(QuarantineError, match=r"6 of 100 records \(6\.0%\)"):
        check_quarantine({"read": 100, "quarantined": 6}, 0.05, "toy")
