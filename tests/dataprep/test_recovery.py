"""Damage in the middle of a file costs only the records that it touches."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.readers import read_file, read_records
from gristmill.dataprep.readers.records import Ended, Read, Reading, Record, Rejected
from tests.dataprep.source_files import files_of, read, texts
from tests.dataprep.warc_records import arc, http, record

RECORDS = 40
TEXTS = [
    f"text {number} " + "".join(f"{number * place % 997:x} " for place in range(60))
    for number in range(RECORDS)
]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def rejected(records: list[Read]) -> list[Rejected]:
    return [item for item in records if isinstance(item, Rejected)]


def warc_parts() -> list[bytes]:
    return [
        record("conversion", text.encode(), number) for number, text in enumerate(TEXTS)
    ]


def arc_parts() -> list[bytes]:
    blocks = (http(text.encode(), content_type="text/plain") for text in TEXTS)
    return arc(
        1,
        *(
            (f"http://a.example/{number}", "text/plain", block)
            for number, block in enumerate(blocks)
        ),
    )


def jsonl_parts() -> list[bytes]:
    return [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]


def csv_parts() -> list[bytes]:
    return [
        b"n,text\n",
        *(f'{number},"{text}"\n'.encode() for number, text in enumerate(TEXTS)),
    ]


PARTS: dict[str, Callable[[], list[bytes]]] = {
    "warc": warc_parts,
    "arc": arc_parts,
    "jsonl": jsonl_parts,
    "csv": csv_parts,
}


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("form", "extension"),
    [
        *((form, ".gz") for form in PARTS),
        ("warc", ".zst"),
        ("warc", ".bz2"),
        ("warc", ".xz"),
    ],
)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.95])
def test_flipped_byte_costs_only_its_member(
    tmp_path: Path, form: str, extension: str, place: float
) -> None:
    parts = PARTS[form]()
    header = len(parts) - RECORDS
    damaged = 20 + header
    packed = [PACK[extension](part) for part in parts]
    at = int(place * len(packed[damaged]))
    offset = sum(map(len, packed[:damaged]))
    packed[damaged] = flipped(packed[damaged], at)
    records = read(tmp_path / f"a.{form}{extension}", b"".join(packed))
    # The row after the gap may be the end of a longer one.
    expected = [
        text
        for number, text in enumerate(TEXTS)
        if number != 20 and not (form == "csv" and number == 21)
    ]
    assert texts(records) == expected
    (error,) = rejected(records)
    assert error.lost == 0
    assert f"{len(packed[damaged]):,} bytes at offset {offset:,}" in error.error


@pytest.mark.parametrize("isal", [True, False])
def test_any_flip_in_a_gzip_member_costs_only_that_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isal: bool
) -> None:
    if not isal:
        monkeypatch.setitem(__import__("sys").modules, "isal", None)
    members = [gzip.compress(part, mtime=0) for part in warc_parts()[:4]]
    for at in range(0, len(members[1]), 5):
        content = b"".join([members[0], flipped(members[1], at), *members[2:]])
        records = read(tmp_path / "a.warc.gz", content)
        kept = texts(records)
        # gzip headers have no checksum: time, flags and system may change without harm.
        assert kept in ([TEXTS[0], *TEXTS[2:4]], TEXTS[:4]), at
        assert len(rejected(records)) == 4 - len(kept)
        assert at < 10 or len(kept) == 3


def test_consecutive_damaged_members_are_one_gap_of_estimated_size(
    tmp_path: Path,
) -> None:
    packed = [gzip.compress(part) for part in warc_parts()]
    damaged = [
        flipped(member, 40) if number in (20, 21, 22) else member
        for number, member in enumerate(packed)
    ]
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(damaged))
    (file,) = files_of(path)
    *records, ended = read_file(file, Reading())
    (error,) = rejected(records)
    assert isinstance(ended, Ended)
    assert (len(texts(records)), error.lost, ended.lost) == (RECORDS - 3, 2, 2)


def test_member_is_found_after_a_damaged_one_longer_than_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_KEPT_BYTES", 200)
    monkeypatch.setattr(compression, "READ_BYTES", 100)
    monkeypatch.setattr(compression, "FEED_BYTES", 64)
    packed = [gzip.compress(part) for part in warc_parts()]
    packed[3] = flipped(packed[3], len(packed[3]) - 6)
    assert (
        texts(read(tmp_path / "a.warc.gz", b"".join(packed))) == TEXTS[:3] + TEXTS[4:]
    )


@pytest.mark.parametrize("form", ["warc", "arc"])
@pytest.mark.parametrize("error", [-300, -60, -3, 3, 20, 400, 3000, 10**9])
def test_wrong_length_costs_only_its_record(
    tmp_path: Path, form: str, error: int
) -> None:
    parts = PARTS[form]()
    at = 20 + len(parts) - RECORDS
    length = (
        len(TEXTS[20])
        if form == "warc"
        else len(http(TEXTS[20].encode(), content_type="text/plain"))
    )
    name = b"Content-Length: %d\r\n" if form == "warc" else b"text/plain %d\n"
    assert name % length in parts[at]
    parts[at] = parts[at].replace(name % length, name % max(length + error, 0))
    records = read(tmp_path / f"a.{form}", b"".join(parts))
    (gap,) = rejected(records)
    if error == 10**9:  # longer than a record may be: the rest is skipped
        assert (texts(records), gap.lost) == (TEXTS[:20], None)
    else:
        assert (texts(records), gap.lost) == (TEXTS[:20] + TEXTS[21:], 0)
        assert f"at offset {sum(map(len, parts[:at])):,}" in gap.error


@pytest.mark.parametrize("form", ["warc", "arc"])
@pytest.mark.parametrize("garbage", [b"no record\r\n\r\n", b"\0" * 5000, b"a\n" * 99])
def test_garbage_between_records_is_one_gap(
    tmp_path: Path, form: str, garbage: bytes
) -> None:
    parts = PARTS[form]()
    before = len(parts) - RECORDS + 9
    records = read(
        tmp_path / f"a.{form}", b"".join([*parts[:before], garbage, *parts[before:]])
    )
    # One line end separates the records of an ARC: without a header after it, the
    # length before it is wrong.
    assert texts(records) == (TEXTS if form == "warc" else TEXTS[:8] + TEXTS[9:])
    (gap,) = rejected(records)
    assert gap.lost == 0


@pytest.mark.parametrize(
    "url", ["http://a.example/b c d", "http://a.example/b 1.2.3.4 c"]
)
@pytest.mark.parametrize("kind", ["text/plain", "text/plain; charset=utf-8", "no type"])
def test_blanks_in_an_arc_url_are_kept(tmp_path: Path, url: str, kind: str) -> None:
    parts = arc_parts()
    block = http(b"blank", content_type="text/plain")
    parts.insert(
        9,
        f"{url} 192.0.2.1 20080430204826 {kind} {len(block)}\n".encode()
        + block
        + b"\n",
    )
    records = read(tmp_path / "a.arc", b"".join(parts))
    (record,) = [
        item for item in records if isinstance(item, Record) and item.text == "blank"
    ]
    assert json.loads(record.metadata)["url"] == url
    assert json.loads(record.metadata)["date"] == "2008-04-30T20:48:26Z"
    assert len(texts(records)) == RECORDS + 1


def table() -> pa.Table:
    return pa.table({"text": TEXTS})


def arrow(new: Callable[..., pa.RecordBatchWriter]) -> bytes:
    buffer = io.BytesIO()
    with new(buffer, table().schema) as writer:
        for batch in table().to_batches(max_chunksize=10):
            writer.write_batch(batch)
    return buffer.getvalue()


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_truncated_arrow_file_yields_its_complete_batches(
    tmp_path: Path, new: Callable[..., pa.RecordBatchWriter]
) -> None:
    intact = arrow(new)
    third = intact.index(TEXTS[20].encode())
    records = read(tmp_path / "a.arrow", intact[: third + 50])
    assert texts(records) == TEXTS[:20]
    (error,) = rejected(records)
    assert error.lost is None


def test_damaged_arrow_batch_costs_only_its_rows(tmp_path: Path) -> None:
    content = bytearray(arrow(pa.ipc.new_file))
    at = content.index(TEXTS[20].encode()) - 44  # the offsets of the third batch
    content[at : at + 8] = b"\xff" * 8
    records = read(tmp_path / "a.arrow", bytes(content))
    assert texts(records) == TEXTS[:20] + TEXTS[30:]
    (error,) = rejected(records)
    assert error.lost == 9


@pytest.mark.parametrize("has_checksums", [True, False])
def test_damaged_row_group_costs_only_its_rows(
    tmp_path: Path, has_checksums: bool
) -> None:
    buffer = io.BytesIO()
    codec = "none" if has_checksums else "gzip"
    pq.write_table(
        table(),
        buffer,
        row_group_size=10,
        compression=codec,
        use_dictionary=False,
        write_page_checksum=has_checksums,
    )
    content = buffer.getvalue()
    group = pq.ParquetFile(io.BytesIO(content)).metadata.row_group(2).column(0)
    at = group.data_page_offset + group.total_compressed_size // 2
    records = read(
        tmp_path / "a.parquet",
        content[:at]
        + bytes(b ^ 0xFF for b in content[at : at + 20])
        + content[at + 20 :],
    )
    assert texts(records) == TEXTS[:20] + TEXTS[30:]
    (error,) = rejected(records)
    assert error.lost == 9


BOM_CODECS = ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-be"]


def with_bom(text: str, codec: str) -> bytes:
    return (
        text if codec in ("utf-8-sig", "utf-16", "utf-32") else f"\ufeff{text}"
    ).encode(codec)


@pytest.mark.parametrize("codec", BOM_CODECS)
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.html", "a.jsonl.gz"])
def test_byte_order_mark_is_honoured_in_every_text_format(
    tmp_path: Path, name: str, codec: str
) -> None:
    text = "Grüße, Ωmega 漢字 😀"
    form = name.split(".")[1]
    content = {
        "txt": text,
        "csv": f'text,n\n"{text}",1\n',
        "jsonl": json.dumps({"text": text}, ensure_ascii=False) + "\n",
        "html": f"<html><body><p>{text}</p></body></html>",
    }[form]
    packed = PACK["." + name.split(".")[2] if name.count(".") == 2 else ""](
        with_bom(content, codec)
    )
    path = tmp_path / name
    path.write_bytes(packed)
    (file,) = files_of(path, extract="none")
    records = list(
        read_records(file, Reading(extract="none") if form == "html" else Reading())
    )
    assert texts(records) == [content if form in ("txt", "html") else text]


def test_text_with_nuls_is_rejected(tmp_path: Path) -> None:
    lines = [{"text": "good"}, {"text": "a\0b\0"}, {"text": "fine"}]
    records = read(
        tmp_path / "a.jsonl",
        "".join(json.dumps(line) + "\n" for line in lines).encode(),
    )
    assert texts(records) == ["good", "fine"]
    assert [item.number for item in rejected(records)] == [2]
    (error,) = read(tmp_path / "b.txt", "plain".encode("utf-16-le"))
    assert isinstance(error, Rejected)


def test_null_text_is_dropped_and_a_missing_field_rejected(tmp_path: Path) -> None:
    lines = b'{"text": null}\n{"other": 1}\n{"text": ""}\n{"text": "a"}\n'
    records = read(tmp_path / "a.jsonl", lines)
    assert [type(item).__name__ for item in records] == [
        "Dropped",
        "Rejected",
        "Dropped",
        "Record",
    ]
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "b.parquet")
    records = read(tmp_path / "b.parquet", (tmp_path / "b.parquet").read_bytes())
    assert [type(item).__name__ for item in records] == ["Record", "Dropped"]


def test_non_finite_numbers_are_strings_in_metadata(tmp_path: Path) -> None:
    lines = b'{"text": "a", "x": NaN, "y": -Infinity, "z": 1e999, "w": 1.5}\n'
    (record,) = read(tmp_path / "a.jsonl", lines)
    pq.write_table(
        pa.table(
            {
                "text": ["a"],
                "x": [float("nan")],
                "y": [float("-inf")],
                "z": [float("inf")],
                "w": [1.5],
            }
        ),
        tmp_path / "b.parquet",
    )
    (row,) = read(tmp_path / "b.parquet", (tmp_path / "b.parquet").read_bytes())
    for document in (record, row):
        assert isinstance(document, Record)
        assert json.loads(document.metadata) == {
            "x": "NaN",
            "y": "-Infinity",
            "z": "Infinity",
            "w": 1.5,
        }
        assert "NaN" in document.metadata
