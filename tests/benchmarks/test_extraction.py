"""Benchmark of extraction: scores of text and structure, from references and
snippets.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import zstandard

from benchmarks.dataprep import extraction
from benchmarks.dataprep.extraction import (
    Reference,
    Score,
    Snippets,
    kept_code,
    kept_formulas,
    kept_rows,
    reference_of,
    rouge,
    score,
)


def test_scores_count_snippets_over_all_pages() -> None:
    labelled = {
        "a": Snippets(["one two", "three"], ["menu"]),
        "b": Snippets(["four"], ["advert", "footer"]),
    }
    # kept: "one two" and "three" of three wanted snippets, "menu" of the unwanted ones;
    # page b has no text
    assert score(labelled, {"a": "Menu, menu: one\n two three"}) == Score(
        2 / 3, 2 / 3, pytest.approx(2 / 3)
    )
    assert score(labelled, {"a": "one two three", "b": "four"}) == Score(1.0, 1.0, 1.0)
    assert score(labelled, {}) == Score(0.0, 0.0, 0.0)


def test_rouge_is_the_harmonic_mean_of_common_n_grams() -> None:
    """3 bigrams of 4 are common; the text has 3 more: 2 * 3 / (4 + 6)."""
    assert rouge("a b c d e", "x, a **b** c; d y z", 2) == pytest.approx(0.6)
    assert rouge("a b c d e", "a b c d e", 5) == 1.0
    assert rouge("a b", "a b", 5) == 0.0


def test_structure_is_found_in_markdown_and_in_plain_text() -> None:
    html = """<table><tr><th>Flour</th><th>Sacks</th></tr><tr><td>rye</td><td>12</td></tr>
    <tr><td>a note over both</td></tr></table><pre>if a:\n    b()\n</pre>
    <p>An <span class="mwe-math-element"><math><semantics><mi>x</mi><annotation>
    {\\displaystyle a_{1} + b}</annotation></semantics></math></span> end</p>"""
    reference = reference_of(html, b"")
    assert reference == Reference(
        b"",
        reference.text,
        [["Flour", "Sacks"], ["rye", "12"]],
        ["if a:\n    b()\n"],
        ["a_{1}+b"],
    )
    assert "a_{1} + b" in reference.text
    markdown = "| Flour | Sacks |\n|---|---|\n| rye | 12 |\n```\nif a:\n    b()\n```"
    assert kept_rows(reference, markdown) == [True, True]
    assert kept_rows(reference, "Flour\tSacks\nrye\n12") == [True, False]
    assert kept_code(reference, markdown) == [True]
    assert kept_code(reference, "if a: b()") == [False]
    assert kept_formulas(reference, "$a_{1}+ b$") == [True]
    assert kept_formulas(reference, "a1+b") == [False]


@pytest.mark.slow
def test_rows_compare_each_extractor_with_all_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "web/trafilatura_cc"
    folder.mkdir(parents=True)
    text = (
        "The mill grinds slowly, yet it grinds exceedingly small, as the old saying "
        "has it. " * 5
    )
    page = (
        "<html><body><nav><a>Site menu</a></nav><article><p>"
        f"{text}</p></article></body></html>"
    ).encode()
    entry = {"file": "p.html", "with": ["grinds slowly"], "without": ["Site menu"]}
    (folder / "evaldata.json").write_text(json.dumps({"http://p.example/": entry}))
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        info = tarfile.TarInfo("html/p.html")
        info.size = len(page)
        archive.addfile(info, io.BytesIO(page))
    (folder / "html.tar.zst").write_bytes(
        zstandard.ZstdCompressor().compress(sink.getvalue())
    )
    monkeypatch.setenv("GRISTMILL_BENCH_DATA", str(tmp_path))
    scores = {row.name: (row.ours, row.peer) for row in extraction.snippet_rows()}
    plain = {name for name in extraction.SETTINGS if "markdown" not in name}
    assert len(scores) == 3 * len(plain)
    for extractor in ("resiliparse", "trafilatura", "trafilatura, favor precision"):
        assert scores[f"{extractor}: precision"] == (1.0, 0.5)
        assert scores[f"{extractor}: recall"] == (1.0, 1.0)


@pytest.mark.slow
def test_documentation_is_measured_everywhere_and_wikipedia_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_BENCH_DATA", str(tmp_path))
    monkeypatch.setattr(extraction, "DOCUMENTATION_PAGES", 3)
    monkeypatch.setattr(
        extraction, "SETTINGS", {"trafilatura": ("trafilatura", {"markdown": True})}
    )
    scores = {row.name: row for row in extraction.rows()}
    assert scores["documentation, trafilatura: ROUGE-5 F1"].ours > 0.9
    assert scores["documentation, trafilatura: tables kept"].ours > 0.9
    assert scores["Wikipedia"].ours is None
    assert scores["main text extraction"].ours is None
