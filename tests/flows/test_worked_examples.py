"""The worked examples of pages of docs/ run in an empty folder, and print what the pages say: `make test-docs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.doc_pages import run_page
from tests.test_architecture import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["meaning.md", "trace-text.md"])
def test_what_the_page_says_happens(name: str, tmp_path: Path) -> None:
    assert run_page(ROOT / "docs" / name, tmp_path) >= 3
