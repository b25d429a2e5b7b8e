"""Ingestion of web crawls: extraction, skipped records, repeats."""

import gzip
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.documents import read_table
from gristmill.dataprep.readers import ingest, sources
from gristmill.dataprep.readers.duplicate_records import DuplicateIdError
from gristmill.dataprep.readers.sources import SourceError
from gristmill.dataprep.runners.tasks import Task
from gristmill.mixtures.schema.sources import Ingest, Source
from tests.dataprep.document_shards import file_contents
from tests.dataprep.own_steps import written
from tests.dataprep.warc_records import http, record

RunIngest = Callable[..., ingest.IngestSummary]


def html(number: int) -> bytes:
    text = f"Page {number} tells of the mill and of what it grinds. " * 8
    return f"<html><head><title>Page {number}</title></head><body><p>{text}</p></body></html>".encode()


@pytest.fixture
def web(tmp_path: Path) -> Path:
    """WARC file with 20 pages (one empty, one in no encoding, two captures of one
    address) among other records.
    """
    parts = [record("warcinfo", b"software: test")]
    for number in range(20):
        body = {7: b"<html></html>", 9: b"\x00\x81\xff\x90\x9d" * 9}.get(
            number, html(0 if number == 1 else number)
        )
        url = f"http://a.example/{0 if number == 1 else number}"
        kind = "text/html; charset=euc-jp" if number == 9 else "text/html"
        parts.append(record("request", b"GET / HTTP/1.1\r\n\r\n"))
        parts.append(record("response", http(body, content_type=kind), number, url))
    parts += [
        record("response", http(b"", "404 Not Found")),
        record("response", http(b"x", content_type="image/png")),
    ]
    (tmp_path / "crawl").mkdir()
    (tmp_path / "crawl/a.warc.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    (tmp_path / "crawl/page.html").write_bytes(html(99))
    cut = record("response", http(html(50)), 50) + record("response", b"x" * 99)[:-50]
    (tmp_path / "crawl/cut.warc").write_bytes(cut)
    return tmp_path / "crawl"


def test_crawl_records_are_kept_dropped_quarantined_or_skipped(
    web: Path, tmp_path: Path, run_ingest: RunIngest
) -> None:
    out = tmp_path / "out"
    config = {
        "sources": {"web": {"path": str(web)}},
        "ingest": {"max_quarantined": 0.5},
    }
    summary = run_ingest(config, out)
    counts = summary.counts
    assert (counts["read"], counts["kept"], counts["quarantined"]) == (23, 20, 2)
    assert (
        counts["dropped"] == counts["sources"]["web"]["dropped"] == {"extract/empty": 1}
    )
    assert (
        summary.skipped
        == summary.sources["web"].skipped
        == {
            "HTTP status 404": 1,
            "content type image/png": 1,
            "request record": 20,
            "warcinfo record": 1,
        }
    )
    documents = written(out)
    assert documents[-1]["locator"] == "page.html"
    assert documents[-1]["text"].startswith("Page 99 tells of the mill")
    assert json.loads(documents[0]["metadata"]) == {
        "content_type": "text/html",
        "date": "2024-05-18T01:58:10Z",
        "title": "Page 0",
        "url": "http://a.example/0",
    }
    captures = [row for row in documents if "/0#" in row["locator"]]
    assert len({row["text"] for row in captures}) == 1
    assert len({row["id"] for row in captures}) == len(captures) == 2
    (dropped,) = read_table(out / "dropped/00000-000.parquet").to_pylist()
    assert (dropped["file"], dropped["record"], dropped["reason"]) == (
        "a.warc.gz",
        17,
        "extract/empty",
    )
    assert dropped["locator"].startswith("http://a.example/7#")
    bad = read_table(out / "quarantine/00000-000.parquet").to_pylist()
    assert [(row["file"], row["record"]) for row in bad] == [
        ("a.warc.gz", 21),
        ("cut.warc", 2),
    ]
    assert "encoding" in bad[0]["error"]


def test_workers_do_not_change_the_extracted_bytes(
    web: Path, tmp_path: Path, run_ingest: RunIngest
) -> None:
    config = {
        "sources": {"web": {"path": str(web)}},
        "ingest": {"max_quarantined": 0.5, "shard_bytes": 2000},
    }
    first = run_ingest(config, "once", workers=1)
    second = run_ingest(config, "again", workers=2)
    assert file_contents(tmp_path / "once") == file_contents(tmp_path / "again")
    assert first == second


def test_mostly_skipped_source_is_warned_about(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    errors = [
        record("response", http(b"x", "404 Not Found"), number) for number in range(5)
    ]
    requests = [record("request", b"GET / HTTP/1.1\r\n\r\n")] * 9
    good = [record("response", http(html(number)), 10 + number) for number in range(4)]
    (tmp_path / "a.warc").write_bytes(b"".join([*requests, *good, *errors]))
    config = {"sources": {"web": {"path": str(tmp_path / "a.warc")}}}
    summary = run_ingest(config)
    (warning,) = summary.warnings
    assert warning.startswith("source 'web': 5 of 9 ")
    assert "HTTP status 404 (5)" in warning
    (tmp_path / "a.warc").write_bytes(b"".join([*requests, *good, *errors[:4]]))
    summary = run_ingest(config, "out2")
    assert summary.warnings == []


def test_limit_holds_for_pages_read_ahead(web: Path, run_ingest: RunIngest) -> None:
    config = {"sources": {"web": {"path": str(web), "limit": 3}}}
    summary = run_ingest(config)
    assert summary.counts["read"] == summary.counts["kept"] == 3
    assert summary.skipped == {"request record": 3, "warcinfo record": 1}


def test_html_field_is_extracted_if_an_extractor_is_named(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    lines = [
        {"page": {"html": html(n).decode(), "url": f"u{n}"}, "n": n} for n in range(2)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = {
        "path": str(tmp_path / "a.jsonl"),
        "text_field": "page.html",
        "id_field": "page.url",
    }
    run_ingest({"sources": {"web": source}}, "raw")
    assert written(tmp_path / "raw")[1]["text"] == html(1).decode()
    run_ingest({"sources": {"web": {**source, "extract": "trafilatura"}}})
    (_, second) = written(tmp_path / "out")
    assert (
        second["text"]
        == ("Page 1 tells of the mill and of what it grinds. " * 8).strip()
    )
    assert second["locator"] == "u1"
    assert json.loads(second["metadata"]) == {"n": 1, "title": "Page 1"}


def test_crawl_without_documents_is_an_error_with_its_counts(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    (tmp_path / "a.warc").write_bytes(
        record("metadata", b"x") + record("response", http(b"<html></html>"))
    )
    with pytest.raises(SourceError, match=r"1 pages .*1 x metadata record"):
        run_ingest({"sources": {"web": {"path": str(tmp_path / "a.warc")}}})


GOOD_AND_BAD = {
    "jsonl": [
        b'{"text": "good"}',
        b"{bad",
        b'{"text": ""}',
        b'{"text": "\xff"}',
        b"  ",
    ],
    "csv": [b"good,1", b"bad", b",1", b"\xff,1", b""],
    "warc": [
        record("conversion", b"good"),
        record("conversion", b"\xff"),
        record("request", b""),
        record("conversion", b""),
        record("response", http(b"x", "500")),
    ],
}


@given(
    files=st.lists(
        st.tuples(
            st.sampled_from(sorted(GOOD_AND_BAD)),
            st.lists(st.integers(0, 4), max_size=12),
            st.integers(0, 30),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None, max_examples=40)
def test_any_mixture_of_good_and_bad_records_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, list[int], int]]
) -> None:
    root = tmp_path_factory.mktemp("mixture")
    good = 0
    for number, (form, kinds, cut) in enumerate(files):
        parts = [GOOD_AND_BAD[form][kind] for kind in kinds]
        content = (
            b"".join(parts)
            if form == "warc"
            else b"\n".join([*([b"text,n"] if form == "csv" else []), *parts])
        )
        (root / f"{number}.{form}.gz").write_bytes(
            gzip.compress(content)[: -cut or None]
        )
        good += kinds.count(0)
    listing_of_source = sources.find_files(
        "s", Source.model_validate({"path": str(root)})
    )
    task = Task(
        "00000",
        {
            "source": "s",
            "files": [asdict(file) for file in listing_of_source.files],
            "reading": {},
            "extract_options": {},
            "limit": None,
        },
    )
    result = ingest.ingest_task(
        str(root / "out"), Ingest(shard_bytes=1000), task
    ).result
    counts = result["counts"]
    assert (
        counts["read"]
        == counts["kept"] + sum(counts["dropped"].values()) + counts["quarantined"]
    )
    assert counts["kept"] <= good
    assert counts["kept"] == sum(
        len(read_table(path)) for path in (root / "out").glob("part-*")
    )
    assert counts["quarantined"] == sum(
        len(read_table(path)) for path in (root / "out").glob("quarantine/*")
    )
    if all(cut == 0 for _, _, cut in files):
        assert counts["kept"] == good
        assert counts["read"] + sum(result["totals"]["skipped"].values()) == sum(
            1
            for form, kinds, _ in files
            for kind in kinds
            if kind < 4 or form == "warc"
        )


def test_crawl_is_read_from_any_store(run_ingest: RunIngest) -> None:
    from upath import UPath

    root = UPath("memory://crawl-test")
    (root / "in").mkdir(parents=True, exist_ok=True)
    for number in range(2):
        packed = gzip.compress(record("response", http(html(number)), number))
        (root / "in" / f"{number}.warc.gz").write_bytes(packed)
    summary = run_ingest(
        {"sources": {"web": {"path": f"{root}/in/*.warc.gz"}}}, root / "out"
    )
    assert summary.counts["kept"] == 2
    assert [row["text"].partition(" tells")[0] for row in written(root / "out")] == [
        "Page 0",
        "Page 1",
    ]


def test_crawl_listed_twice_is_read_once_or_rejected(
    tmp_path: Path, run_ingest: RunIngest
) -> None:
    content = record("response", http(html(1)), 1)
    (tmp_path / "a.warc").write_bytes(content)
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(content))
    source = {"path": str(tmp_path / "a.warc*")}
    summary = run_ingest({"sources": {"web": source}})
    assert (summary.counts["kept"], summary.counts["dropped"]) == (
        1,
        {"ingest/repeated": 1},
    )
    with pytest.raises(DuplicateIdError, match=r"1 records .*a\.example/#.*WARC"):
        run_ingest({"sources": {"web": {**source, "on_repeat": "fail"}}}, "out2")
