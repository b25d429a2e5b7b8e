"""Every command of the start pages runs in an empty folder and prints the page's
output: `make test-docs`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from tests.flows.doc_pages import BLOCK, MARKED, run_page

START = ROOT / "docs" / "start"
RUN = ["only-clean.md", "only-fine-tune.md", "only-tokens.md", "own-corpus.md"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUN)
def test_examples_of_the_page_run_as_documented(name: str, tmp_path: Path) -> None:
    assert run_page(START / name, tmp_path) >= 3


@pytest.mark.parametrize("name", RUN)
def test_every_block_of_the_page_is_executed_or_a_used_file(name: str) -> None:
    text = (START / name).read_text()
    assert [block["text"] for block in MARKED.finditer(text)] == [
        block_text for _, block_text in BLOCK.findall(text)
    ]
