"""Readers of files: compression, bad lines, fields, encodings, Parquet."""

import bz2
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.readers import read_records
from gristmill.dataprep.readers.records import (
    Dropped,
    Page,
    Read,
    Reading,
    Record,
    Rejected,
)
from tests.dataprep.source_files import errors, files_of, texts

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def read(path: Path, reading: Reading | None = None, **keys: str) -> list[Read]:
    (file,) = files_of(path, format="auto", **keys)
    return list(read_records(file, reading or Reading()))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("extension", COMPRESS)
def test_every_compression_yields_the_same_records(
    tmp_path: Path, extension: str
) -> None:
    lines = b"".join(
        json.dumps({"text": f"text {n}", "n": n}).encode() + b"\n" for n in range(500)
    )
    path = write(tmp_path / f"a.jsonl{extension}", COMPRESS[extension](lines))
    records = read(path)
    assert texts(records) == [f"text {n}" for n in range(500)]
    assert records[7] == Record(8, f"a.jsonl{extension}#8", "text 7", '{"n": 7}')


def test_byte_order_mark_before_a_later_line_is_rejected(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        b'\xef\xbb\xbf{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n{"text": "c"}\n',
    )
    records = read(path)
    assert texts(records) == ["a", "c"]
    assert list(errors(records)) == [2]
    assert "BOM" in errors(records)[2]


@pytest.mark.parametrize(
    "line",
    [
        r'{"text": "\udcff"}',
        r'{"text": "a", "k": "\udcff"}',
        r'{"text": "a", "k\udcff": 1}',
        r'{"text": "é\udcff", "k": "é"}',
    ],
)
def test_lone_surrogate_is_rejected_anywhere(tmp_path: Path, line: str) -> None:
    ((number, error),) = errors(
        read(write(tmp_path / "a.jsonl", line.encode()))
    ).items()
    assert number == 1
    assert "surrogate \\udcff" in error


@pytest.mark.parametrize("extension", [".gz", ".bz2", ".zst"])
def test_concatenated_members_are_one_file(tmp_path: Path, extension: str) -> None:
    part = COMPRESS[extension]
    path = write(
        tmp_path / f"a.jsonl{extension}",
        part(b'{"text": "a"}\n{"te') + part(b'xt": "b"}\n'),
    )
    assert texts(read(path)) == ["a", "b"]


@pytest.mark.parametrize("extension", [".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_damage_is_one_rejected_record_after_the_good_ones(
    tmp_path: Path, extension: str, damage: str
) -> None:
    lines = [json.dumps({"text": f"text {n}"}).encode() + b"\n" for n in range(10)]
    good, bad = (
        COMPRESS[extension](b"".join(lines[:6])),
        COMPRESS[extension](b"".join(lines[6:])),
    )
    bad = bad[:-9] if damage == "cut" else b"this is no compressed data"
    path = write(tmp_path / f"a.jsonl{extension}", good + bad)
    records = read(path)
    assert texts(records)[:6] == [f"text {n}" for n in range(6)]
    assert len(errors(records)) == 1
    (last,) = errors(records).values()
    assert isinstance(records[-1], Rejected)
    assert records[-1].number == len(records)
    assert ("cut off" if damage == "cut" else "damaged") in last
    assert extension in last


def test_damaged_text_file_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"some text " * 100)[:-10])
    assert list(errors(read(path))) == [1]


def test_bad_lines_are_rejected_with_their_reasons(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b"not json",
        b'["text"]',
        b'{"body": "x"}',
        b'{"text": 3}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b'{"text": ""}',
        b'{"text": null}',
        b"",
        b'{"text": "m", "note": "\\udfff"}',
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    records = read(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    assert texts(records) == ["good", "last"]
    facts = {
        2: ["JSON"],
        3: ["JSON object", "list"],
        4: ["'text'", "body"],
        5: ["'text'", "string", "number"],
        6: ["surrogate \\ud800"],
        7: ["UTF-8", "byte 0xff at position 10"],
        11: ["metadata", "surrogate \\udfff"],
        12: ["nested"],
    }
    assert errors(records).keys() == facts.keys()
    for number, error in errors(records).items():
        for fact in facts[number]:
            assert fact in error
    assert Dropped(8, "extract/empty", "a.jsonl#8") in records
    assert Dropped(9, "extract/empty", "a.jsonl#9") in records
    for record in records:
        if isinstance(record, Rejected):
            record.excerpt.encode("utf-8")
            assert len(record.excerpt) <= 2000


def test_oversized_line_is_rejected_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "MAX_RECORD_BYTES", 50)
    monkeypatch.setattr(compression, "READ_BYTES", 16)
    lines = [
        b'{"text": "a"}',
        b'{"text": "' + b"x" * 100 + b'"}',
        b'{"text": "b"}',
        b'{"text": "' + b"y" * 100,
    ]
    records = read(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    assert texts(records) == ["a", "b"]
    assert sorted(errors(records)) == [2, 4]
    assert "longer than" in errors(records)[2]


@given(
    lines=st.lists(
        st.binary(max_size=30).map(
            lambda line: line.replace(b"\n", b"").replace(b"\r", b"")
        )
    ),
    step=st.integers(1, 40),
)
def test_lines_do_not_depend_on_the_read_size(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], step: int
) -> None:
    lines = [b"no byte order mark", *lines]
    path = write(
        tmp_path_factory.getbasetemp() / "lines",
        b"".join(line + b"\r\n" for line in lines),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "READ_BYTES", step)
        assert list(compression.read_lines(path, "")) == lines


def test_text_file_is_one_document_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\1three\n")
    assert read(path) == [Record(1, "a.txt", "one\r\ntwo\1three\n", "{}")]


def test_empty_and_binary_text_files_are_rejected(tmp_path: Path) -> None:
    assert "empty" in errors(read(write(tmp_path / "a.txt", b"")))[1]
    assert (
        "UTF-8: byte 0xc3 at position 2"
        in errors(read(write(tmp_path / "b.txt", b"ab\xc3")))[1]
    )


def test_configured_fields_are_text_id_and_metadata(tmp_path: Path) -> None:
    row = {
        "body": "t",
        "url": "http://x",
        "year": 1999,
        "tags": ["a"],
        "none": None,
        "ok": True,
        "odd": float("nan"),
    }
    path = write(tmp_path / "a.jsonl", json.dumps(row).encode())
    (record,) = read(path, Reading(text="body", id="url"))
    assert isinstance(record, Record)
    assert (record.locator, record.text) == ("http://x", "t")
    assert json.loads(record.metadata) == {"year": 1999, "ok": True, "odd": "NaN"}
    (record,) = read(path, Reading(text="body", metadata=("tags", "absent")))
    assert isinstance(record, Record)
    assert (record.locator, json.loads(record.metadata)) == (
        "a.jsonl#1",
        {"tags": ["a"]},
    )
    assert "'missing'" in errors(read(path, Reading(text="body", id="missing")))[1]


def test_parquet_rows_are_records(tmp_path: Path) -> None:
    table = pa.table(
        {"text": ["a", None, "", "d"], "n": [1, 2, 3, 4], "parts": [[1], [2], [3], [4]]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    records = read(tmp_path / "a.parquet")
    assert records[0] == Record(1, "a.parquet#1", "a", '{"n": 1}')
    assert texts(records) == ["a", "d"]
    assert [item.number for item in records if isinstance(item, Dropped)] == [2, 3]


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x")
    (file,) = files_of(path, format="auto")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(read_records(file, Reading()))


def test_nested_fields_are_addressed_by_dots(tmp_path: Path) -> None:
    row = {
        "content": {"body": "inner", "id": 7, "deep": {"er": "x"}},
        "content.body": "literal",
        "n": 1,
    }
    path = write(tmp_path / "a.jsonl", json.dumps(row).encode())
    (record,) = read(path, Reading(text="content.body", id="content.id"))
    assert isinstance(record, Record)
    # a literal key takes precedence
    assert (record.text, record.locator) == ("literal", "7")
    (record,) = read(
        path, Reading(text="content.deep.er", metadata=("content.id", "absent.key"))
    )
    assert isinstance(record, Record)
    assert (record.text, json.loads(record.metadata)) == ("x", {"content.id": 7})
    (error,) = errors(read(path, Reading(text="content.none"))).values()
    assert "'content.none'" in error
    assert "content, content.body, n" in error
    table = pa.table({"content": [{"body": "b", "id": 1}], "n": [2]})
    pq.write_table(table, tmp_path / "a.parquet")
    reading = Reading(text="content.body", id="content.id")
    assert read(tmp_path / "a.parquet", reading) == [Record(1, "1", "b", '{"n": 2}')]


def test_binary_column_is_decoded_or_passed_to_the_extractor(tmp_path: Path) -> None:
    column = pa.array(["é".encode(), "é".encode("latin-1"), b""], pa.binary())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    records = read(tmp_path / "a.parquet")
    assert texts(records) == ["é"]
    assert "UTF-8: byte 0xe9 at position 0" in errors(records)[2]
    assert texts(read(tmp_path / "a.parquet", Reading(encoding="cp1252"))) == [
        "Ã©",
        "é",
    ]
    pages = read(tmp_path / "a.parquet", Reading(extract="resiliparse"))
    assert pages[:2] == [
        Page(1, "a.parquet#1", "é".encode()),
        Page(2, "a.parquet#2", b"\xe9"),
    ]
    assert pages[2] == Dropped(3, "extract/empty", "a.parquet#3")


def test_encoding_of_text_files_is_named_or_detected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "naïve café".encode("cp1252"))
    assert "UTF-8: byte 0xef at position 2" in errors(read(path))[1]
    assert read(path, Reading(encoding="cp1252")) == [
        Record(1, "a.txt", "naïve café", '{"encoding": "cp1252"}')
    ]
    path = write(tmp_path / "b.txt", "\ufeffnaïve".encode("utf-16-le"))
    assert read(path, Reading(encoding="auto")) == [
        Record(1, "b.txt", "naïve", '{"encoding": "utf-16-le"}')
    ]


def test_html_file_is_a_page_or_keeps_its_markup(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.html.gz",
        gzip.compress("<meta charset=latin1><p>é".encode("latin-1")),
    )
    assert read(path) == [
        Page(1, "a.html.gz", "<meta charset=latin1><p>é".encode("latin-1"))
    ]
    assert read(path, Reading(extract="none")) == [
        Record(1, "a.html.gz", "<meta charset=latin1><p>é", '{"encoding": "cp1252"}')
    ]
    assert "empty" in errors(read(write(tmp_path / "b.htm", b"")))[1]
    assert ".gz" in errors(read(write(tmp_path / "c.html.gz", b"no gzip")))[1]
    picture = write(tmp_path / "d.html", b"\x89PNG\x00\x01\x81\xfe" + bytes(range(256)))
    assert list(errors(read(picture, Reading(extract="none")))) == [1]
