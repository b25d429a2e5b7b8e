"""The reference of the manifest matches the schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from gristmill.mixtures.base import docstrings
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.rules import GopherQuality
from tests.ci_scripts import load_script

REFERENCE = load_script("manifest_reference")
FOLDER = ROOT / "docs" / "manifest"


@pytest.mark.slow
def test_committed_reference_pages_match_the_schema() -> None:
    written = {
        path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")
    }
    assert written == REFERENCE.pages(), "run: make reference"


def test_every_section_has_a_page_and_every_key_a_kind_a_default_and_a_meaning() -> (
    None
):
    written = REFERENCE.pages()
    rows = [
        line
        for text in written.values()
        for line in text.splitlines()
        if line.startswith(("| `", "| [`"))
    ]
    assert "| `min_words` | whole number | `50` |" in written["prepare-filter.md"]
    assert "| `packing` | `stream`, `best_fit` | `stream` |" in written["mix.md"]
    assert "## `prepare[].dedup.minhash`" in written["prepare-dedup.md"]
    assert "## `sources.<name>`" in written["sources.md"]
    assert "| [`pretrain`](pretrain.md) |" in written[REFERENCE.INDEX]
    assert len(rows) > 250
    assert [line for line in rows if not line.split("|")[-2].strip()] == []


def test_reference_pages_are_short_and_links_resolve() -> None:
    written = REFERENCE.pages()
    assert max(map(len, written.values())) < 40_000
    for text in written.values():
        for page, anchor in re.findall(r"\]\(([\w-]+\.md)(?:#([\w-]+))?\)", text):
            anchors = {
                REFERENCE.anchor_of(heading)
                for heading in re.findall(r"^## (.*)$", written[page], re.MULTILINE)
            }
            assert not anchor or anchor in anchors, (page, anchor)


def test_write_pages_deletes_pages_of_removed_sections(tmp_path: Path) -> None:
    (tmp_path / "former.md").write_text("")
    REFERENCE.write_pages(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(REFERENCE.pages())


@pytest.mark.slow
def test_json_schema_contains_the_docstring_of_every_setting() -> None:
    """Includes names of steps and settings inherited from base classes, but not
    settings that an editor shows by their section.
    """
    kinds = Manifest.model_json_schema()["$defs"]
    assert (
        kinds["GopherQuality"]["properties"]["min_words"]["description"]
        == docstrings(GopherQuality)["min_words"]
        == "Smallest number of words."
    )
    assert kinds["FilterStep"]["properties"]["name"]["description"].startswith(
        "Name of the step, beside the stage: `{"
    )
    assert kinds["Filter"]["properties"]["max_quarantined"]["description"].startswith(
        "Share of documents that may"
    )
    settings = [
        setting
        for kind in kinds.values()
        for setting in kind.get("properties", {}).values()
    ]
    bare = [setting for setting in settings if "description" not in setting]
    assert len(settings) > 900
    assert all("$ref" in setting or "anyOf" in setting for setting in bare), (
        "a setting has no docstring"
    )
