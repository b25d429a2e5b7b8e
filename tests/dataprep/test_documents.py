"""Document and annotation tables: content-derived ids, aligned rows, balanced
counts.
"""

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
        {
            "id": document_id(source, str(n), text),
            "source": source,
            "locator": str(n),
            "text": text,
            "metadata": "{}",
        }
        for n, (text, source) in enumerate(zip(texts, sources, strict=True))
    ]
    return pa.Table.from_pylist(rows, DOCUMENT_SCHEMA)


def write_stages(folder: Path, table: pa.Table, **stages: pa.Table) -> dict[str, Path]:
    """Write documents and the annotations of stages as one shard, and return the
    folders.
    """
    inputs = {name: folder / name for name in ("ingest", *stages)}
    for name, rows in {"ingest": table, **stages}.items():
        write_table(inputs[name] / "part-0.parquet", rows)
    return inputs


@given(st.lists(st.tuples(*[st.text()] * 3), min_size=2, max_size=2, unique=True))
def test_different_documents_have_different_ids(
    pair: list[tuple[str, str, str]],
) -> None:
    def storable(parts: tuple[str, str, str]) -> bool:
        return not any(
            "\ud800" <= character <= "\udfff" for part in parts for character in part
        )

    if all(map(storable, pair)):
        assert document_id(*pair[0]) != document_id(*pair[1])


def test_id_is_the_hash_of_length_prefixed_parts() -> None:
    digest = hashlib.blake2b(digest_size=16)
    for part in (b"web", "é#1".encode(), "text \U0001f33e".encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    assert document_id("web", "é#1", "text \U0001f33e") == digest.digest()
    assert document_id("ab", "c", "d") != document_id("a", "bc", "d")


def test_annotations_judge_the_rows_of_the_sources_and_pass_the_others(
    tmp_path: Path,
) -> None:
    table = documents(["aa", "b", "cccc", "d"], ["x", "x", "y", "x"])
    rows = np.array([0, 2, 3])
    judged = judged_rows(table, rows, ["x"])
    assert judged.tolist() == [0, 3]
    annotations, counts = annotate(
        table, rows, judged, [None, "too_short"], {"size": pa.array([2, 1])}
    )
    assert annotations["keep"].to_pylist() == [True, None, True, False]
    assert annotations["reason"].to_pylist() == [None, None, None, "too_short"]
    assert annotations["size"].to_pylist() == [2, None, None, 1]
    assert counts["read"] == 3
    assert counts["kept"] == 2
    assert counts["dropped"] == {"too_short": 1}
    assert (counts["bytes_read"], counts["bytes_kept"]) == (7, 6)
    assert counts["sources"]["y"]["kept"] == 1
    check_conservation(counts, "toy")


def test_document_with_an_error_is_quarantined_despite_its_verdict() -> None:
    table = documents(["a", "b"], ["x", "x"])
    rows = np.array([0, 1])
    annotations, counts = annotate(
        table, rows, rows, [None, "rule"], {}, ["it broke", None]
    )
    assert annotations["keep"].to_pylist() == [False, False]
    assert annotations["error"].to_pylist() == ["it broke", None]
    assert (counts["quarantined"], counts["dropped"]) == (1, {"rule": 1})


@given(st.data())
def test_annotations_and_counts_equal_a_plain_loop(data: st.DataObject) -> None:
    row = st.tuples(
        st.text(max_size=4),
        st.sampled_from("xyz"),
        st.sampled_from(["unknown", "passes", "judged"]),
        st.sampled_from([None, "r", "s"]),
        st.sampled_from([None, "broke"]),
    )
    drawn_documents = data.draw(st.lists(row, max_size=12))
    texts, sources, states = (
        np.array([document[:3] for document in drawn_documents], object)
        .reshape(-1, 3)
        .T
    )
    table = documents(texts, sources)
    rows = np.flatnonzero(states != "unknown")
    judged = np.flatnonzero(states == "judged")
    reasons, errors = (
        [drawn_documents[at][column] for at in judged] for column in (3, 4)
    )
    annotations, counts = annotate(
        table, rows, judged, reasons, {"place": pa.array(judged)}, errors
    )
    expected: dict[str, dict[str, Any]] = {}
    for at, (text, source, state, reason, error) in enumerate(drawn_documents):
        final = None if state != "judged" else "quarantine" if error else reason
        assert annotations["keep"][at].as_py() == (
            None if state == "unknown" else final is None
        )
        assert annotations["reason"][at].as_py() == final
        assert annotations["error"][at].as_py() == (
            error if state == "judged" else None
        )
        assert annotations["place"][at].as_py() == (at if state == "judged" else None)
        if state == "unknown":
            continue
        part = expected.setdefault(source, empty_counts())
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
    assert counts == add_counts([empty_counts(), *expected.values()])


def empty_counts() -> dict[str, Any]:
    numbers = ("read", "kept", "quarantined", "bytes_read", "bytes_kept")
    return {**dict.fromkeys(numbers, 0), "dropped": {}}


def test_number_of_verdicts_must_match_the_judged_documents() -> None:
    table = documents(["a", "b"], ["x", "x"])
    with pytest.raises(ValueError, match=r"2 documents .* 1 reasons .* 2 errors"):
        annotate(table, np.arange(2), np.arange(2), [None], {})


def test_rows_are_kept_if_all_stages_keep_them(tmp_path: Path) -> None:
    table = documents(["a", "b", "c"], ["x"] * 3)
    all_rows, remaining = np.arange(3), np.array([0, 2])
    inputs = write_stages(
        tmp_path,
        table,
        filter=annotate(table, all_rows, all_rows, [None, "r", None], {})[0],
        dedup=annotate(table, remaining, remaining, ["r", None], {})[0],
    )
    assert kept_rows({"ingest": inputs["ingest"]}, "part-0.parquet").tolist() == [
        0,
        1,
        2,
    ]
    assert kept_rows(inputs, "part-0.parquet").tolist() == [2]


def test_misaligned_annotations_are_rejected(tmp_path: Path) -> None:
    table = documents(["a", "b"], ["x", "x"])
    rows = np.arange(2)
    annotations, _ = annotate(table, rows, rows, [None, None], {})
    inputs = write_stages(tmp_path, table, filter=annotations.take([1, 0]))
    with pytest.raises(MisalignedError, match="gristmill stage filter"):
        read_annotations(inputs, "part-0.parquet", "filter")


def test_counts_add_up_in_any_order() -> None:
    parts = [
        {"read": 2, "dropped": {"a": 1}},
        {"read": 1, "dropped": {"a": 1, "b": 3}},
        {"read": 4},
    ]
    assert (
        add_counts(parts)
        == add_counts(reversed(parts))
        == {"read": 7, "dropped": {"a": 2, "b": 3}}
    )


def test_lost_document_fails_the_stage_and_names_the_source() -> None:
    good = {"read": 2, "kept": 1, "dropped": {"r": 1}, "quarantined": 0}
    check_conservation({**good, "sources": {"x": good}}, "toy")
    with pytest.raises(ConservationError, match=r"toy: x: 3 documents .* 2"):
        check_conservation({**good, "sources": {"x": {**good, "read": 3}}}, "toy")


def test_shard_counts_are_added_up_and_must_balance() -> None:
    shards = [
        {"counts": {"read": 3, "kept": 2, "quarantined": 1}},
        {"counts": {"read": 2, "dropped": {"r": 2}}},
    ]
    assert balance(shards, 0.2, "toy") == {
        "read": 5,
        "kept": 2,
        "quarantined": 1,
        "dropped": {"r": 2},
    }
    with pytest.raises(QuarantineError, match="1 of 5"):
        balance(shards, 0.1, "toy")
    with pytest.raises(ConservationError, match=r"toy: .*6 documents .* 5"):
        balance([*shards, {"counts": {"read": 1}}], 0.2, "toy")


def test_quarantine_above_the_limit_fails_the_stage() -> None:
    check_quarantine({"read": 100, "quarantined": 5}, 0.05, "toy")
    with pytest.raises(QuarantineError, match=r"6 of 100 records \(6\.0%\)"):
        check_quarantine({"read": 100, "quarantined": 6}, 0.05, "toy")


def test_quarantine_failure_names_the_commonest_error_and_the_tables(
    tmp_path: Path,
) -> None:
    write_table(
        tmp_path / "part-0.parquet",
        pa.table(
            {
                "file": ["a", "b", "c", "d"],
                "record": [1, 2, 3, 4],
                "error": [
                    None,
                    "ValueError: once",
                    "ValueError: bad",
                    "ValueError: bad",
                ],
            }
        ),
    )
    with pytest.raises(QuarantineError) as caught:
        balance(
            [{"counts": {"read": 9, "quarantined": 9}}], 0.05, "toy", errors=tmp_path
        )
    assert "ValueError: bad (2 records, first in c, record 3)" in str(caught.value)
    assert f"`error` of {tmp_path}/*.parquet" in str(caught.value)


def test_texts_and_ids_are_not_dictionary_encoded(tmp_path: Path) -> None:
    write_table(tmp_path / "part-00000.parquet", documents(["grain"] * 20, ["a"] * 20))
    group = pq.ParquetFile(tmp_path / "part-00000.parquet").metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    assert [
        column.path_in_schema for column in columns if column.has_dictionary_page
    ] == ["source", "metadata"]


def test_flipped_bits_are_reported_with_the_repair_command(tmp_path: Path) -> None:
    """Random words are stored uncompressed, so that only checksums reveal a flipped
    bit.
    """
    rng = np.random.default_rng(5)
    texts = ["".join(map(chr, rng.integers(97, 123, 300))) for _ in range(20)]
    path = tmp_path / "part-00000.parquet"
    table, messages = documents(texts, ["a"] * 20), list[str]()
    write_table(path, table)
    intact = path.read_bytes()
    text = pq.ParquetFile(path).metadata.row_group(0).column(3)
    begin, size = text.data_page_offset, text.total_compressed_size
    for at in range(begin, begin + size, 61):
        damaged = bytearray(intact)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            assert read_table(path) == table, (
                "unused bits, such as those of a statistic"
            )
        except DamagedTableError as error:
            messages.append(str(error))
    assert len(messages) > 50
    for message in messages:
        assert "part-00000.parquet" in message
        assert "gristmill verify MANIFEST --repair" in message
    with pytest.raises(FileNotFoundError):
        read_table(tmp_path / "none.parquet")
