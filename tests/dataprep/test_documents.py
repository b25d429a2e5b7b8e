"""Document and annotation tables: ids are content, rows stay aligned, and every document is counted once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.conservation import (
    ConservationError,
    QuarantineError,
    add_counts,
    balance,
    check_conservation,
    check_quarantine,
)
from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    DamagedTableError,
    MisalignedError,
    annotate,
    document_id,
    judged_rows,
    kept_rows,
    read_annotations,
    read_table,
    write_table,
)


def documents(texts: list[str], sources: list[str]) -> pa.Table:
    rows = [
        {"id": document_id(source, str(n), text), "source": source, "locator": str(n), "text": text, "metadata": "{}"}
        for n, (text, source) in enumerate(zip(texts, sources, strict=True))
    ]
    return pa.Table.from_pylist(rows, DOCUMENT_SCHEMA)


@given(st.lists(st.tuples(*[st.text()] * 3), min_size=2, max_size=2, unique=True))
def test_documents_that_differ_in_anything_have_different_ids(pair: list[tuple[str, str, str]]) -> None:
    def storable(parts: tuple[str, str, str]) -> bool:
        return not any("\ud800" <= character <= "\udfff" for part in parts for character in part)

    if all(map(storable, pair)):
        assert document_id(*pair[0]) != document_id(*pair[1])


def test_moving_a_character_from_one_part_to_the_next_changes_the_id() -> None:
    assert document_id("ab", "c", "d") != document_id("a", "bc", "d")


def test_an_id_is_the_hash_of_the_parts_each_after_its_size_in_bytes() -> None:
    digest = hashlib.blake2b(digest_size=16)
    for part in (b"web", "é#1".encode(), "text \U0001f33e".encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    assert document_id("web", "é#1", "text \U0001f33e") == digest.digest()


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


@given(st.data())
def test_tables_and_counts_agree_with_a_plain_loop_over_the_documents(data: st.DataObject) -> None:
    row = st.tuples(
        st.text(max_size=4),
        st.sampled_from("xyz"),
        st.sampled_from(["unknown", "passes", "judged"]),
        st.sampled_from([None, "r", "s"]),
        st.sampled_from([None, "broke"]),
    )
    drawn = data.draw(st.lists(row, max_size=12))
    table = documents([each[0] for each in drawn], [each[1] for each in drawn])
    rows = np.array([at for at, each in enumerate(drawn) if each[2] != "unknown"], np.int64)
    judged = np.array([at for at, each in enumerate(drawn) if each[2] == "judged"], np.int64)
    reasons, errors = ([drawn[at][column] for at in judged] for column in (3, 4))
    made, counts = annotate(table, rows, judged, reasons, {"place": pa.array(judged)}, errors)
    expected: dict[str, dict[str, Any]] = {}
    for at, (text, source, state, reason, error) in enumerate(drawn):
        final = None if state != "judged" else "quarantine" if error else reason
        assert made["keep"][at].as_py() == (None if state == "unknown" else final is None)
        assert made["reason"][at].as_py() == final
        assert made["error"][at].as_py() == (error if state == "judged" else None)
        assert made["place"][at].as_py() == (at if state == "judged" else None)
        if state == "unknown":
            continue
        part = expected.setdefault(
            source, {"read": 0, "kept": 0, "dropped": {}, "quarantined": 0, "bytes_read": 0, "bytes_kept": 0}
        )
        part["read"] += 1
        part["bytes_read"] += len(text.encode())
        if final is None:
            part["kept"] += 1
            part["bytes_kept"] += len(text.encode())
        elif final == "quarantine":
            part["quarantined"] += 1
        else:
            part["dropped"][final] = part["dropped"].get(final, 0) + 1
    assert counts.pop("sources") == expected
    assert counts == add_counts([{**empty_counts(), "dropped": {}}, *expected.values()])


def empty_counts() -> dict[str, int]:
    return dict.fromkeys(("read", "kept", "quarantined", "bytes_read", "bytes_kept"), 0)


def test_verdicts_and_errors_must_be_as_many_as_judged_documents() -> None:
    table = documents(["a", "b"], ["x", "x"])
    with pytest.raises(ValueError, match="2 documents were judged, with 1 reasons and 2 errors"):
        annotate(table, np.arange(2), np.arange(2), [None], {})


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


def test_the_results_of_a_stage_are_added_up_and_must_balance() -> None:
    shards = [{"counts": {"read": 3, "kept": 2, "quarantined": 1}}, {"counts": {"read": 2, "dropped": {"r": 2}}}]
    assert balance(shards, 0.2, "toy") == {"read": 5, "kept": 2, "quarantined": 1, "dropped": {"r": 2}}
    with pytest.raises(QuarantineError, match="1 of 5 records"):
        balance(shards, 0.1, "toy")
    with pytest.raises(ConservationError, match="toy: all sources: 6 documents were read but 5"):
        balance([*shards, {"counts": {"read": 1}}], 0.2, "toy")


def test_more_quarantine_than_allowed_fails_the_stage() -> None:
    check_quarantine({"read": 100, "quarantined": 5}, 0.05, "toy")
    with pytest.raises(QuarantineError, match=r"6 of 100 records \(6\.0%\)"):
        check_quarantine({"read": 100, "quarantined": 6}, 0.05, "toy")


def test_a_stage_that_fails_for_its_quarantine_names_the_first_error_and_where_all_are(tmp_path: Path) -> None:
    write_table(tmp_path / "part-0.parquet", pa.table({"error": pa.array([None, "ValueError: bad"], pa.string())}))
    with pytest.raises(QuarantineError) as caught:
        balance([{"counts": {"read": 9, "quarantined": 9}}], 0.05, "toy", errors=tmp_path)
    assert f"the first: ValueError: bad; see all in the column `error` of {tmp_path}/*.parquet, and correct" in str(
        caught.value
    )


def test_texts_and_ids_are_written_without_dictionaries_of_their_values(tmp_path: Path) -> None:
    write_table(tmp_path / "part-00000.parquet", documents(["grain"] * 20, ["a"] * 20))
    group = pq.ParquetFile(tmp_path / "part-00000.parquet").metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    assert [column.path_in_schema for column in columns if column.has_dictionary_page] == ["source", "metadata"]


def test_flipped_bits_of_a_documents_page_are_an_error_with_a_way_to_mend_them(tmp_path: Path) -> None:
    """Of words that do not repeat, whose page holds them as they are: without checksums other text would be read."""
    random = np.random.default_rng(5)
    texts = ["".join(map(chr, random.integers(97, 123, 300))) for _ in range(20)]
    path = tmp_path / "part-00000.parquet"
    table, said = documents(texts, ["a"] * 20), list[str]()
    write_table(path, table)
    whole = path.read_bytes()
    text = pq.ParquetFile(path).metadata.row_group(0).column(3)
    begin, size = text.data_page_offset, text.total_compressed_size
    for at in range(begin, begin + size, 61):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            assert read_table(path) == table, "a bit that nobody reads, such as of a statistic"
        except DamagedTableError as error:
            said.append(str(error))
    assert len(said) > 50
    assert all("part-00000.parquet is damaged: " in one and "gristmill verify MANIFEST --repair" in one for one in said)
    with pytest.raises(FileNotFoundError):
        read_table(tmp_path / "none.parquet")
