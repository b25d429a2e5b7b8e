"""CSV and TSV rows as records; bad rows are quarantined alone."""

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.records import Dropped, Reading, Record, Rejected
from tests.dataprep.source_files import errors, read, texts


def test_header_names_the_columns_and_quoted_fields_hold_anything(
    tmp_path: Path,
) -> None:
    content = b'id,text,year\r\n7,"one, ""two""\r\nthree\x01",1999\r\n\r\n8,plain,\r\n'
    first, second = read(tmp_path / "a.csv", content)
    assert first == Record(
        1, "a.csv#1", 'one, "two"\r\nthree\1', '{"id": "7", "year": "1999"}'
    )
    assert second == Record(2, "a.csv#2", "plain", '{"id": "8", "year": ""}')
    (named, _) = read(tmp_path / "a.csv", content, Reading(id="id", metadata=("year",)))
    assert isinstance(named, Record)
    assert (named.locator, json.loads(named.metadata)) == ("7", {"year": "1999"})


def test_tsv_is_separated_by_tabs_and_may_be_compressed(tmp_path: Path) -> None:
    records = read(tmp_path / "a.tsv.gz", gzip.compress(b"text\tn\na, b\t1\n"))
    assert records == [Record(1, "a.tsv.gz#1", "a, b", '{"n": "1"}')]


def test_bad_rows_are_quarantined_alone(tmp_path: Path) -> None:
    rows = [b"text,n", b"a,1", b"b", b"c,2,3", b'"d"x,4', b"\xff,5", b",6", b"e,7"]
    records = read(tmp_path / "a.csv", b"\n".join(rows))
    assert texts(records) == ["a", "e"]
    facts = {2: "1 fields", 3: "3 fields", 4: "',' expected after '\"'", 5: "byte 0xff"}
    assert errors(records).keys() == facts.keys()
    for number, fact in facts.items():
        assert fact in errors(records)[number]
    assert Dropped(6, "extract/empty", "a.csv#6") in records


def test_unusable_header_rejects_the_file(tmp_path: Path) -> None:
    assert list(errors(read(tmp_path / "a.csv", b"text,text\na,b\n"))) == [1]
    assert "',' expected" in errors(read(tmp_path / "a.csv", b'"text"x\na\n'))[1]
    (error,) = errors(read(tmp_path / "a.csv", b"body\na\n")).values()
    assert "'text'" in error
    assert "body" in error
    assert read(tmp_path / "a.csv", b"") == []


def test_truncated_file_yields_the_rows_before_the_damage(tmp_path: Path) -> None:
    packed = gzip.compress(b"text\n" + b"".join(b"row %d\n" % n for n in range(5)))
    records = read(tmp_path / "a.csv.gz", packed[:-6])
    assert texts(records) == [f"row {n}" for n in range(5)]
    assert list(errors(records)) == [6]


def test_encoding_is_named_or_detected(tmp_path: Path) -> None:
    text = "Все люди рождаются свободными и равными в своём достоинстве и правах."
    content = f"text\n{text}\n".encode("cp1251")
    assert texts(read(tmp_path / "a.csv", content, Reading(encoding="cp1251"))) == [
        text
    ]
    assert texts(read(tmp_path / "a.csv", content, Reading(encoding="auto"))) == [text]
    assert list(errors(read(tmp_path / "a.csv", content))) == [1]
    assert (
        texts(
            read(
                tmp_path / "a.csv",
                f"\ufefftext\n{text}\n".encode("utf-16"),
                Reading(encoding="utf-16"),
            )
        )
        == []
    )
    assert texts(
        read(
            tmp_path / "a.csv",
            f"text\n{text}\n".encode("utf-16"),
            Reading(encoding="auto"),
        )
    ) == [text]
    assert texts(read(tmp_path / "a.csv", f"\ufefftext\n{text}\n".encode())) == [text]


def test_invalid_utf16_is_quarantined(tmp_path: Path) -> None:
    content = "text\na\n".encode("utf-16") + b"\x00\xd8" + "\nb\n".encode("utf-16-le")
    records = read(tmp_path / "a.csv", content, Reading(encoding="utf-16"))
    assert len(errors(records)) == 1
    assert "not valid utf-16" in next(iter(errors(records).values()))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_wide_encoding_without_a_byte_order_mark_is_quarantined(
    tmp_path: Path, encoding: str
) -> None:
    content = "text\na\n".encode(f"{encoding}-le")
    (record,) = read(tmp_path / "a.csv", content, Reading(encoding=encoding))
    assert isinstance(record, Rejected)
    assert record.lost is None
    assert f"{encoding}-le" in record.error
    named = Reading(encoding=f"{encoding}-le")
    assert texts(read(tmp_path / "a.csv", content, named)) == ["a"]


@given(
    rows=st.lists(
        st.text(
            st.characters(exclude_categories=("Cs",), exclude_characters="\0"),
            min_size=1,
        ),
        min_size=1,
        max_size=8,
    ),
    step=st.integers(1, 50),
)
def test_csv_round_trips_for_any_read_size(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], step: int
) -> None:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, quoting=csv.QUOTE_ALL).writerows(
        [["text"], *([row] for row in rows)]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "READ_BYTES", step)
        patch.setattr("gristmill.dataprep.readers.csv_rows.SNIFFED_BYTES", step)
        records = read(
            tmp_path_factory.getbasetemp() / "rows.csv", buffer.getvalue().encode()
        )
    assert texts(records) == rows
