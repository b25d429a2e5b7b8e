"""WARC, WET and ARC files: pages, skipped records, damage."""

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.readers import read_records
from gristmill.dataprep.readers.records import (
    Dropped,
    Input,
    Page,
    Read,
    Reading,
    Record,
    Rejected,
    Skipped,
)
from gristmill.dataprep.readers.warc import read_warc, sniff_type
from tests.dataprep.source_files import errors, files_of, read
from tests.dataprep.warc_records import arc, http, record

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "web"


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def pages(records: list[Read]) -> list[bytes]:
    return [item.content for item in records if isinstance(item, Page)]


def test_html_response_is_a_page_with_the_crawls_metadata(tmp_path: Path) -> None:
    content = record(
        "response",
        http("<p>é</p>".encode()),
        7,
        "<https://a.example/x>",
        WARC_Truncated="length",
    )
    assert read(tmp_path / "a.warc", content) == [
        Page(
            1,
            "https://a.example/x#00000007-0000-0000-0000-000000000000",
            "<p>é</p>".encode(),
            "auto",
            "utf-8",
            {
                "url": "https://a.example/x",
                "date": "2024-05-18T01:58:10Z",
                "truncated": "length",
                "content_type": "text/html",
            },
        )
    ]


def test_plain_text_is_a_record(tmp_path: Path) -> None:
    content = record(
        "response",
        http("é".encode("latin-1"), content_type="text/plain; charset=ISO-8859-1"),
    )
    (document,) = read(tmp_path / "a.warc", content)
    assert isinstance(document, Record)
    assert document.text == "é"
    assert json.loads(document.metadata) == {
        "url": "http://a.example/",
        "date": "2024-05-18T01:58:10Z",
        "content_type": "text/plain",
        "charset": "iso-8859-1",
        "encoding": "cp1252",
    }


def test_other_records_are_skipped_with_a_reason(tmp_path: Path) -> None:
    content = b"".join(
        [
            record("warcinfo", b"software: x"),
            record("request", b"GET / HTTP/1.1\r\n\r\n"),
            record("revisit", http(b"")),
            record("metadata", b"x"),
            record("resource", b"<p>x</p>"),
            record("response", http(b"x", "404 Not Found")),
            record("response", http(b"x", "301 Moved")),
            record("response", http(b"\x89PNG", content_type="image/PNG")),
            record("response", http(b"<p>page</p>"), 11),
            record("response", b"dns data", Content_Type="text/dns"),
        ]
    )
    records = read(tmp_path / "a.warc", content)
    assert [item.reason for item in records if isinstance(item, Skipped)] == [
        "warcinfo record",
        "request record",
        "revisit record",
        "metadata record",
        "resource record",
        "HTTP status 404",
        "HTTP status 301",
        "content type image/png",
        "response of another protocol than HTTP",
    ]
    assert pages(records) == [b"<p>page</p>"]
    assert [item.candidate for item in records if isinstance(item, Skipped)] == [
        False
    ] * 5 + [True] * 4
    assert len(records) == 10


def test_wet_file_yields_texts(tmp_path: Path) -> None:
    content = record(
        "conversion",
        "Escopete é\n".encode(),
        3,
        WARC_Identified_Content_Language="spa,eng",
    )
    bad = record("conversion", b"\xff\xfe", 4) + record("conversion", b"", 5)
    records = read(tmp_path / "a.wet", content + bad)
    assert isinstance(records[0], Record)
    assert (records[0].locator, records[0].text) == (
        "http://a.example/#00000003-0000-0000-0000-000000000000",
        "Escopete é\n",
    )
    assert json.loads(records[0].metadata)["language"] == "spa,eng"
    assert list(errors(records)) == [2]
    assert "UTF-8: byte 0xff at position 0" in errors(records)[2]
    assert records[2] == Dropped(
        3, "extract/empty", "http://a.example/#00000005-0000-0000-0000-000000000000"
    )


def test_bodies_are_decoded_and_invalid_ones_cost_only_their_page(
    tmp_path: Path,
) -> None:
    responses = [
        http(gzip.compress(b"<p>zipped</p>"), Content_Encoding="gzip"),
        http(b"<p>no gzip at all</p>", Content_Encoding="gzip"),
        http(b"b\r\n<p>chunk</p\r\n1\r\n>\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
        http(b"<p>not in chunks</p>", Transfer_Encoding="chunked"),
        http(b"\x00\x01", Content_Encoding="unheard-of"),
        http(
            gzip.compress(b"<p>never in chunks</p>"),
            Content_Encoding="gzip",
            Transfer_Encoding="chunked",
        ),
        http(b"19\r\n<p>the end is missi", Transfer_Encoding="chunked"),
        b"HTTP/1.1\r\nContent-Type: text/html\r\n\r\n<p>no status</p>",
        b"",
        http(b"<p>last</p>"),
    ]
    content = b"".join(
        record("response", response, number)
        for number, response in enumerate(responses)
    )
    records = read(tmp_path / "a.warc", content)
    assert pages(records) == [
        b"<p>zipped</p>",
        b"<p>no gzip at all</p>",
        b"<p>chunk</p>",
        b"<p>not in chunks</p>",
        b"<p>never in chunks</p>",
        b"<p>last</p>",
    ]
    assert sorted(errors(records)) == [5, 7, 8, 9]
    assert "unheard-of" in errors(records)[5]
    assert "status" in errors(records)[8]
    assert errors(records)[8] == errors(records)[9]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_header_lines_can_end_in_a_line_feed_alone(tmp_path: Path, end: str) -> None:
    lines = [
        "HTTP/1.1 200 OK",
        "Content-Type: text/html; charset=iso-8859-15",
        "Content-Encoding: gzip",
        "",
        "",
    ]
    content = record(
        "response",
        end.join(lines).encode() + gzip.compress(b"<p>x</p>\r\n\r\n<p>y</p>\n\n"),
    )
    (page,) = read(tmp_path / "a.warc", content)
    assert isinstance(page, Page)
    assert (page.content, page.charset) == (
        b"<p>x</p>\r\n\r\n<p>y</p>\n\n",
        "iso-8859-15",
    )


SNIFFED = [
    (b" \r\n<!DocType HTML>x", "text/html"),
    (b"<h1>x</h1>", "text/html"),
    (b"<p>x", "text/html"),
    (b"<!-- x --><p>", "text/html"),
    (b"\xef\xbb\xbf<html >", "text/html"),
    (b"<para>x</para>", "text/plain"),
    (b"just words", "text/plain"),
    (b"", "text/plain"),
    (b"\xff\xfea\0", "text/plain"),
    (b'<?xml version="1.0"?><!DOCTYPE html PUBLIC "x"><html>', "application/xhtml+xml"),
    (b"<?xml version='1.0'?><rss>", "text/xml"),
    (b"%PDF-1.4 x", "application/pdf"),
    (b"\x89PNG\r\n\x1a\n\0\0", "application/octet-stream"),
    (b"a" * 1444 + b"\0", "application/octet-stream"),
    (b"a" * 1445 + b"\0", "text/plain"),
]
"""Bodies and their types by the rules of browsers."""


@pytest.mark.parametrize(
    ("declared", "body", "kind"),
    [
        *((None, body, kind) for body, kind in SNIFFED),
        *(
            (declared, b"<p>x", "text/html")
            for declared in ("", "nonsense", "unknown/unknown", "*/*")
        ),
    ],
)
def test_body_without_a_type_is_sniffed_like_in_browsers(
    tmp_path: Path, declared: str | None, body: bytes, kind: str
) -> None:
    assert sniff_type(body) == kind
    header = b"" if declared is None else f"Content-Type: {declared}\r\n".encode()
    (item,) = read(
        tmp_path / "a.warc",
        record("response", b"HTTP/1.1 200 OK\r\n" + header + b"\r\n" + body),
    )
    if kind in ("text/html", "application/xhtml+xml"):
        assert isinstance(item, Page)
        assert item.metadata["content_type"] == kind
    elif b"\0" in body and kind == "text/plain" and not body.startswith(b"\xff\xfe"):
        assert isinstance(item, Rejected)
    elif kind == "text/plain":
        assert isinstance(item, Record | Dropped)
    else:
        assert isinstance(item, Skipped)
        assert item.candidate
        assert kind in item.reason


ARC_RECORDS = (
    ("dns:a.example", "text/dns", b"20080430204825\na.example. 1 IN A 192.0.2.1\n"),
    ("http://a.example/", "text/html", http(b"<p>one</p>")),
    ("http://a.example/b c", "text/html", http(b"<p>two</p>\n")),
    ("http://a.example/x.png", "image/png", http(b"\x89PNG", content_type="image/png")),
    (
        "http://a.example/3",
        "text/html",
        b"HTTP/1.0 200 OK\nContent-Type: text/html\n\n<p>three</p>",
    ),
)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("extension", ["", ".gz"])
def test_arc_files_are_read_like_warc_files(
    tmp_path: Path, version: int, extension: str
) -> None:
    parts = arc(version, *ARC_RECORDS)
    content = b"".join(map(gzip.compress, parts)) if extension else b"".join(parts)
    records = read(tmp_path / f"a.arc{extension}", content)
    assert pages(records) == [b"<p>one</p>", b"<p>two</p>\n", b"<p>three</p>"]
    assert [item.reason for item in records if isinstance(item, Skipped)] == [
        "description of an ARC file",
        "response of another protocol than HTTP",
        "content type image/png",
    ]
    spaced = [item for item in records if isinstance(item, Page)][1]
    assert spaced.locator == f"http://a.example/b c#a.arc{extension}#4"
    assert spaced.metadata == {
        "url": "http://a.example/b c",
        "date": "2008-04-30T20:48:26Z",
        "truncated": "",
        "content_type": "text/html",
    }


@pytest.mark.parametrize("extension", ["", ".gz"])
def test_truncated_arc_file_yields_the_pages_before(
    tmp_path: Path, extension: str
) -> None:
    parts = arc(1, *ARC_RECORDS)
    content = (
        b"".join(map(gzip.compress, parts))[:-30] if extension else b"".join(parts)[:-9]
    )
    records = read(tmp_path / f"a.arc{extension}", content)
    assert pages(records) == [b"<p>one</p>", b"<p>two</p>\n"]
    (error,) = [item for item in records if isinstance(item, Rejected)]
    assert error.lost is None
    assert "cut off" in error.error


def test_xz_and_arc_crawls_are_read_from_folders(tmp_path: Path) -> None:
    parts = [
        record("response", http(b"<p>%d</p>" % number * 999), number)
        for number in range(3)
    ]
    (tmp_path / "b.warc.xz").write_bytes(lzma.compress(b"".join(parts)))
    (tmp_path / "d.arc.gz").write_bytes(
        b"".join(map(gzip.compress, arc(1, *ARC_RECORDS)))
    )
    files = files_of(tmp_path)
    assert [file.format for file in files] == ["warc"] * 2
    records_of_file = {file.name: list(read_records(file, Reading())) for file in files}
    assert pages(records_of_file["b.warc.xz"]) == [
        b"<p>%d</p>" % n * 999 for n in range(3)
    ]
    assert len(pages(records_of_file["d.arc.gz"])) == 3


@pytest.mark.parametrize("extension", PACK)
@pytest.mark.parametrize("cut", ["in a page", "in a header", "in a skipped record"])
def test_truncated_file_yields_the_pages_before_and_one_rejected_record(
    tmp_path: Path, extension: str, cut: str
) -> None:
    *intact, last = [
        record("response", http(b"<p>%d</p>" % n + b"x" * 300), n) for n in range(3)
    ]
    if cut == "in a skipped record":
        last = record("request", b"GET / HTTP/1.1\r\n" + b"x" * 300)
    last = last[:40] if cut == "in a header" else last[:-100]
    packed = b"".join(map(PACK[extension], [*intact, last]))
    records = read(tmp_path / f"a.warc{extension}", packed[: -5 if extension else None])
    assert [page[:8] for page in pages(records)] == [b"<p>0</p>", b"<p>1</p>"]
    assert len(records) == 3
    (error,) = errors(records).values()
    assert ("cut off" if extension else "damaged or cut off") in error


def test_file_that_is_not_an_archive_is_one_rejected_record(tmp_path: Path) -> None:
    (item,) = read(tmp_path / "b.warc", b"<html>no WARC</html>")
    assert isinstance(item, Rejected)
    assert item.lost is None
    assert read(tmp_path / "c.warc", b"") == []


def test_oversized_record_is_rejected_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "MAX_RECORD_BYTES", 500)
    bomb = http(gzip.compress(bytes(100_000)), Content_Encoding="gzip")
    content = b"".join(
        [
            record("response", http(b"x" * 1000)),
            record("response", bomb),
            record("response", http(b"<p>b</p>")),
        ]
    )
    records = read(tmp_path / "a.warc", content)
    assert pages(records) == [b"<p>b</p>"]
    assert list(errors(records)) == [1, 2]


@pytest.mark.parametrize("kind", ["request", "response"])
def test_failing_storage_is_an_error_rather_than_damage(kind: str) -> None:
    content = record(kind, http(b"x" * 100_000))

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() >= 50_000:
                raise OSError(5, "Input/output error")
            return super().read(10_000)

    class Path:
        def open(self, mode: str, /) -> io.BytesIO:
            return Failing(content)

    with pytest.raises(OSError, match="Input/output error"):
        list(read_warc(Input("a.warc", Path()), Reading()))


def test_repeated_address_has_distinct_locators(tmp_path: Path) -> None:
    records = read(
        tmp_path / "a.warc",
        record("conversion", b"same", 1) + record("conversion", b"same", 2),
    )
    locators = [item.locator for item in records if isinstance(item, Record)]
    assert locators == [
        f"http://a.example/#0000000{n}-0000-0000-0000-000000000000" for n in (1, 2)
    ]
    unnamed = record("conversion", b"x").replace(b"WARC-Record-ID", b"X-Record-ID")
    (item,) = read(tmp_path / "b.warc", unnamed)
    assert isinstance(item, Record)
    assert item.locator == "http://a.example/#b.warc#1"


def test_extract_none_keeps_the_decoded_markup(tmp_path: Path) -> None:
    content = record(
        "response",
        http('<meta charset="latin1"><p>é'.encode("latin-1"), content_type="text/html"),
    )
    (document,) = read(
        tmp_path / "a.warc", content, Reading(extract="none", metadata=("encoding",))
    )
    assert isinstance(document, Record)
    assert (document.text, document.metadata) == (
        '<meta charset="latin1"><p>é',
        '{"encoding": "cp1252"}',
    )


@pytest.mark.slow
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_damage_never_raises(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    parts = [
        record(
            "response", http(b"5\r\n<p>a</p>\r\n0\r\n\r\n", Transfer_Encoding="chunked")
        ),
        record("request", b"GET / HTTP/1.1\r\n\r\n"),
        record("conversion", b"text"),
    ]
    content = bytearray(b"".join(parts))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 40))] = data.draw(
            st.binary(max_size=20)
        )
    for item in read(tmp_path_factory.getbasetemp() / "damaged.warc", bytes(content)):
        assert not isinstance(item, Rejected) or item.error


@pytest.mark.skipif(not DATA.exists(), reason="the shared data are not here")
@pytest.mark.parametrize(
    ("name", "kept", "skipped"),
    [
        ("warcio/example.warc", 1, 5),
        ("warcio/example.warc.gz", 1, 5),
        ("warcio/example-iana.org-chunked.warc", 1, 2),
        ("warcio/example-resource.warc.gz", 0, 3),
        ("whirlwind/whirlwind.warc", 1, 3),
        ("whirlwind/whirlwind.warc.wet.gz", 1, 1),
        ("dolma/sample-0001.warc.gz", 15, 19),
    ],
)
def test_real_archives_are_read_completely(name: str, kept: int, skipped: int) -> None:
    (file,) = files_of(DATA / name)
    records = list(read_records(file, Reading()))
    assert errors(records) == {}
    assert sum(isinstance(item, Page | Record) for item in records) == kept
    assert sum(isinstance(item, Skipped) for item in records) == skipped
