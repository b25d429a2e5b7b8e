"""The reference of the manifest says what the schema says."""

from __future__ import annotations

from pathlib import Path

from gristmill.flows.authoring.manifest_reference import markdown
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.section import docstrings
from gristmill.mixtures.steps.rules import GopherQuality

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


def test_the_json_schema_says_of_each_setting_what_its_docstring_says() -> None:
    """Also of a step's name, of one that a base class has, and of none that an editor shows by its section."""
    kinds = Manifest.model_json_schema()["$defs"]
    quality = kinds["GopherQuality"]["properties"]
    assert quality["min_words"]["description"] == docstrings(GopherQuality)["min_words"] == "Least number of words."
    assert kinds["FilterStep"]["properties"]["name"]["description"].startswith("Names the step, beside the stage: `{")
    assert kinds["Filter"]["properties"]["max_quarantined"]["description"].startswith("Share of documents that may")
    said = [setting for kind in kinds.values() for setting in kind.get("properties", {}).values()]
    bare = [setting for setting in said if "description" not in setting]
    assert len(said) > 1000
    assert all("$ref" in setting or "anyOf" in setting for setting in bare), "a setting has no docstring"
