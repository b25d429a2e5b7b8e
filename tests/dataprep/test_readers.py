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

from gristmill.dataprep.reading import compression
from gristmill.dataprep.reading.readers import read_records
from gristmill.dataprep.reading.records import Dropped, Page, Read, Reading, Record, Rejected
from gristmill.dataprep.reading.sources import find_files

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def read(path: Path, reading: Reading | None = None, **keys: str) -> list[Read]:
    (file,) = find_files("s", {"path": str(path), "format": "auto", **keys}).files
    return list(read_records(file, reading or Reading()))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def errors(records: list[Read]) -> dict[int, str]:
    return {record.number: record.error for record in records if isinstance(record, Rejected)}


def texts(records: list[Read]) -> list[str]:
    return [record.text for record in records if isinstance(record, Record)]


@pytest.mark.parametrize("extension", COMPRESS)
def test_every_compression_gives_the_same_records(tmp_path: Path, extension: str) -> None:
    lines = b"".join(json.dumps({"text": f"text {n}", "n": n}).encode() + b"\n" for n in range(500))
    path = write(tmp_path / f"a.jsonl{extension}", COMPRESS[extension](lines))
    records = read(path)
    assert texts(records) == [f"text {n}" for n in range(500)]
    assert records[7] == Record(8, f"a.jsonl{extension}#8", "text 7", '{"n": 7}')


def test_a_byte_order_mark_before_a_later_line_is_no_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n{"text": "c"}\n')
    records = read(path)
    assert texts(records) == ["a", "c"]
    assert errors(records) == {
        2: "not valid JSON: Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"
    }


@pytest.mark.parametrize(
    "line",
    [
        r'{"text": "\udcff"}',
        r'{"text": "a", "k": "\udcff"}',
        r'{"text": "a", "k\udcff": 1}',
        r'{"text": "é\udcff", "k": "é"}',
    ],
)
def test_a_lone_surrogate_is_found_wherever_it_is(tmp_path: Path, line: str) -> None:
    ((number, error),) = errors(read(write(tmp_path / "a.jsonl", line.encode()))).items()
    assert number == 1
    assert error.endswith("has a lone surrogate \\udcff, which UTF-8 cannot hold")


@pytest.mark.parametrize("extension", [".gz", ".bz2", ".zst"])
def test_concatenated_members_are_one_file(tmp_path: Path, extension: str) -> None:
    part = COMPRESS[extension]
    path = write(tmp_path / f"a.jsonl{extension}", part(b'{"text": "a"}\n{"te') + part(b'xt": "b"}\n'))
    assert texts(read(path)) == ["a", "b"]


@pytest.mark.parametrize("extension", [".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_records_before_damage_are_kept_and_the_damage_is_one_quarantined_record(
    tmp_path: Path, extension: str, damage: str
) -> None:
    lines = [json.dumps({"text": f"text {n}"}).encode() + b"\n" for n in range(10)]
    good, bad = COMPRESS[extension](b"".join(lines[:6])), COMPRESS[extension](b"".join(lines[6:]))
    bad = bad[:-9] if damage == "cut" else b"this is no compressed data"
    path = write(tmp_path / f"a.jsonl{extension}", good + bad)
    records = read(path)
    assert texts(records)[:6] == [f"text {n}" for n in range(6)]
    assert len(errors(records)) == 1
    (last,) = errors(records).values()
    assert isinstance(records[-1], Rejected)
    assert records[-1].number == len(records)
    assert ("cut off" if damage == "cut" else "damaged") in last


def test_a_damaged_text_file_gives_no_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"some text " * 100)[:-10])
    assert errors(read(path)) == {1: ".gz data ends in the middle: the file is cut off"}


def test_bad_lines_are_quarantined_each_with_its_reason(tmp_path: Path) -> None:
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
    found = errors(records)
    assert sorted(found) == [2, 3, 4, 5, 6, 7, 11, 12]
    assert found[2].startswith("not valid JSON")
    assert found[3] == "a JSON object was expected, not a list"
    assert found[4] == "no field 'text'; the fields are body"
    assert found[5] == "field 'text' must be a string, not a number"
    assert found[6] == "text has a lone surrogate \\ud800, which UTF-8 cannot hold"
    assert found[7] == "not valid UTF-8: byte 0xff at position 10"
    assert Dropped(8, "extract/empty", "a.jsonl#8") in records  # as an empty page is
    assert Dropped(9, "extract/empty", "a.jsonl#9") in records
    assert found[11] == "metadata has a lone surrogate \\udfff, which UTF-8 cannot hold"
    assert "nested too deeply" in found[12]
    for record in records:
        if isinstance(record, Rejected):
            record.excerpt.encode("utf-8")
            assert len(record.excerpt) <= 2000


def test_a_line_longer_than_allowed_is_refused_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "MAX_RECORD_BYTES", 50)
    monkeypatch.setattr(compression, "READ_BYTES", 16)
    lines = [b'{"text": "a"}', b'{"text": "' + b"x" * 100 + b'"}', b'{"text": "b"}', b'{"text": "' + b"y" * 100]
    records = read(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    assert texts(records) == ["a", "b"]
    assert sorted(errors(records)) == [2, 4]
    assert "longer than" in errors(records)[2]


@given(
    lines=st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))),
    step=st.integers(1, 40),
)
def test_lines_do_not_depend_on_where_the_pieces_are_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], step: int
) -> None:
    lines = [b"no byte order mark", *lines]
    path = write(tmp_path_factory.getbasetemp() / "lines", b"".join(line + b"\r\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "READ_BYTES", step)
        assert list(compression.read_lines(path, "")) == lines


def test_a_text_file_is_one_document_unchanged_but_for_its_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\1three\n")
    assert read(path) == [Record(1, "a.txt", "one\r\ntwo\1three\n", "{}")]


def test_an_empty_and_a_binary_text_file_are_quarantined(tmp_path: Path) -> None:
    assert errors(read(write(tmp_path / "a.txt", b""))) == {1: "empty file"}
    assert errors(read(write(tmp_path / "b.txt", b"ab\xc3"))) == {1: "not valid UTF-8: byte 0xc3 at position 2"}


def test_fields_choose_text_id_and_metadata(tmp_path: Path) -> None:
    row = {"body": "t", "url": "http://x", "year": 1999, "tags": ["a"], "none": None, "ok": True, "odd": float("nan")}
    path = write(tmp_path / "a.jsonl", json.dumps(row).encode())
    (record,) = read(path, Reading(text="body", id="url"))
    assert isinstance(record, Record)
    assert (record.locator, record.text) == ("http://x", "t")
    assert json.loads(record.metadata) == {"year": 1999, "ok": True, "odd": "NaN"}
    (record,) = read(path, Reading(text="body", metadata=("tags", "absent")))
    assert isinstance(record, Record)
    assert (record.locator, json.loads(record.metadata)) == ("a.jsonl#1", {"tags": ["a"]})
    assert errors(read(path, Reading(text="body", id="missing"))) == {
        1: "field 'missing' must be a string or an integer, not null"
    }


def test_parquet_rows_are_records(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", None, "", "d"], "n": [1, 2, 3, 4], "parts": [[1], [2], [3], [4]]})
    pq.write_table(table, tmp_path / "a.parquet")
    records = read(tmp_path / "a.parquet")
    assert records[0] == Record(1, "a.parquet#1", "a", '{"n": 1}')
    assert texts(records) == ["a", "d"]
    assert [item.number for item in records if isinstance(item, Dropped)] == [2, 3]


def test_a_parquet_row_that_is_not_utf8_is_quarantined_alone(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff\xfe", b"c"])
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    records = read(tmp_path / "a.parquet")
    assert texts(records) == ["a", "c"]
    assert errors(records) == {2: "not valid UTF-8: byte 0xff at position 0"}


def test_damaged_parquet_files_are_quarantined(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [f"{n} " * 50 for n in range(4000)]}), tmp_path / "a.parquet", row_group_size=1000)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    (found,) = read(write(tmp_path / "cut.parquet", bytes(content[:-100])))
    assert isinstance(found, Rejected)
    assert found.number == 1
    middle = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(2).column(0).data_page_offset
    content[middle : middle + 200] = b"\xff" * 200
    records = read(write(tmp_path / "b.parquet", bytes(content)))
    assert texts(records) == [f"{n} " * 50 for n in (*range(2000), *range(3000, 4000))]
    assert list(errors(records)) == [2001]


def test_a_file_that_cannot_be_opened_is_an_error_not_a_quarantined_record(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x")
    (file,) = find_files("s", {"path": str(path), "format": "auto"}).files
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(read_records(file, Reading()))


def test_fields_may_lie_inside_of_others(tmp_path: Path) -> None:
    row = {"content": {"body": "inner", "id": 7, "deep": {"er": "x"}}, "content.body": "literal", "n": 1}
    path = write(tmp_path / "a.jsonl", json.dumps(row).encode())
    (record,) = read(path, Reading(text="content.body", id="content.id"))
    assert isinstance(record, Record)
    assert (record.text, record.locator) == ("literal", "7")  # a key of that very name comes first
    (record,) = read(path, Reading(text="content.deep.er", metadata=("content.id", "absent.key")))
    assert isinstance(record, Record)
    assert (record.text, json.loads(record.metadata)) == ("x", {"content.id": 7})
    assert errors(read(path, Reading(text="content.none"))) == {
        1: "no field 'content.none'; the fields are content, content.body, n"
    }
    table = pa.table({"content": [{"body": "b", "id": 1}], "n": [2]})
    pq.write_table(table, tmp_path / "a.parquet")
    reading = Reading(text="content.body", id="content.id")
    assert read(tmp_path / "a.parquet", reading) == [Record(1, "1", "b", '{"n": 2}')]


def test_a_column_of_bytes_is_decoded_or_handed_to_the_extractor_as_it_is(tmp_path: Path) -> None:
    column = pa.array(["é".encode(), "é".encode("latin-1"), b""], pa.binary())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    records = read(tmp_path / "a.parquet")
    assert texts(records) == ["é"]
    assert errors(records) == {2: "not valid UTF-8: byte 0xe9 at position 0"}
    assert texts(read(tmp_path / "a.parquet", Reading(encoding="cp1252"))) == ["Ã©", "é"]
    pages = read(tmp_path / "a.parquet", Reading(extract="resiliparse"))
    assert pages[:2] == [Page(1, "a.parquet#1", "é".encode()), Page(2, "a.parquet#2", b"\xe9")]
    assert pages[2] == Dropped(3, "extract/empty", "a.parquet#3")


def test_an_encoding_may_be_named_or_found_for_text_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "naïve café".encode("cp1252"))
    assert errors(read(path)) == {1: "not valid UTF-8: byte 0xef at position 2"}
    assert read(path, Reading(encoding="cp1252")) == [Record(1, "a.txt", "naïve café", '{"encoding": "cp1252"}')]
    path = write(tmp_path / "b.txt", "\ufeffnaïve".encode("utf-16-le"))
    assert read(path, Reading(encoding="auto")) == [Record(1, "b.txt", "naïve", '{"encoding": "utf-16-le"}')]


def test_an_html_file_is_a_page_unless_its_markup_is_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.html.gz", gzip.compress("<meta charset=latin1><p>é".encode("latin-1")))
    assert read(path) == [Page(1, "a.html.gz", "<meta charset=latin1><p>é".encode("latin-1"))]
    assert read(path, Reading(extract="none")) == [
        Record(1, "a.html.gz", "<meta charset=latin1><p>é", '{"encoding": "cp1252"}')
    ]
    assert errors(read(write(tmp_path / "b.htm", b""))) == {1: "empty file"}
    assert errors(read(write(tmp_path / "c.html.gz", b"no gzip"))) == {
        1: ".gz data is damaged: Error -3 while decompressing data: incorrect header check"
    }
    picture = write(tmp_path / "d.html", b"\x89PNG\x00\x01\x81\xfe" + bytes(range(256)))
    assert list(errors(read(picture, Reading(extract="none")))) == [1]
