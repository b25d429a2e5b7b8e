"""The reference of the manifest says what the schema says."""

from __future__ import annotations

from pathlib import Path

from gristmill.flows.authoring.manifest_reference import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "manifest.md"


def test_the_page_is_what_the_schema_says_now() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: gristmill schema --markdown > docs/manifest.md"


def test_every_key_has_a_kind_a_default_and_a_meaning() -> None:
    page = markdown()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert "| `min_words` | whole number | `50` |" in page
    assert "| `packing` | `stream`, `best_fit` | `stream` |" in page
    assert "## `prepare[].dedup.minhash`" in page
    assert "## `sources.<name>`" in page
    assert len(rows) > 250
    assert [line for line in rows if not line.split("|")[-2].strip()] == []
