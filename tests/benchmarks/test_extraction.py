import io
import json
import tarfile
from pathlib import Path

import pytest
import zstandard

from benchmarks.dataprep import bench_extraction, bench_reading
from benchmarks.dataprep.bench_extraction import Score, Snippets, score


def test_scores_count_snippets_over_all_pages() -> None:
    labelled = {"a": Snippets(["one two", "three"], ["menu"]), "b": Snippets(["four"], ["advert", "footer"])}
    # kept: "one two" and "three" of three wanted ones, "menu" of the unwanted ones; page b has no text
    assert score(labelled, {"a": "Menu, menu: one\n two three"}) == Score(2 / 3, 2 / 3, pytest.approx(2 / 3))
    assert score(labelled, {"a": "one two three", "b": "four"}) == Score(1.0, 1.0, 1.0)
    assert score(labelled, {}) == Score(0.0, 0.0, 0.0)


def test_without_labelled_pages_a_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_BENCH_DATA", str(tmp_path))
    (row,) = bench_extraction.rows()
    assert (row["ours"], row["peer"], row["ratio"]) == (None, None, None)
    assert "has no labelled pages" in row["note"]


def test_rows_compare_each_extractor_with_all_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "web/trafilatura_cc"
    folder.mkdir(parents=True)
    text = "The mill grinds slowly, yet it grinds exceedingly small, as the old saying has it. " * 5
    page = f"<html><body><nav><a>Site menu</a></nav><article><p>{text}</p></article></body></html>".encode()
    entry = {"file": "p.html", "with": ["grinds slowly"], "without": ["Site menu"]}
    (folder / "evaldata.json").write_text(json.dumps({"http://p.example/": entry}))
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        info = tarfile.TarInfo("html/p.html")
        info.size = len(page)
        archive.addfile(info, io.BytesIO(page))
    (folder / "html.tar.zst").write_bytes(zstandard.ZstdCompressor().compress(sink.getvalue()))
    monkeypatch.setenv("GRISTMILL_BENCH_DATA", str(tmp_path))
    found = {row["name"]: (row["ours"], row["peer"]) for row in bench_extraction.rows()}
    assert len(found) == 9
    for extractor in ("resiliparse", "trafilatura", "trafilatura, favor precision"):
        assert found[f"{extractor}: precision"] == (1.0, 0.5)
        assert found[f"{extractor}: recall"] == (1.0, 1.0)


def test_the_benchmark_of_reading_gets_all_pages_back(tmp_path: Path) -> None:
    pages = bench_reading.make_pages(3)
    path = tmp_path / "crawl.warc.gz"
    path.write_bytes(bench_reading.make_warc(pages))
    assert bench_reading.read_pages(path) == bench_reading.iterate(path) == 3
    assert bench_reading.guarded(pages, "resiliparse") == bench_reading.direct(pages, "resiliparse") == 3


def test_both_ways_of_reading_json_lines_find_all_records(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(bench_reading.make_jsonl(7))
    assert bench_reading.read_jsonl(path) == bench_reading.parse_lines(path) == 7
