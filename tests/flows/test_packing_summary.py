"""The summary of a run's packing and its cost."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gristmill.flows.pages.terminal_pages import print_table
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.mixture import Waste, packing, packing_table, waste_of
from gristmill.tokenize.packing.packing_cost import PackingCost
from tests.flows.rendered import facts_of, html_of

COST = {
    "rows": 125,
    "tokens": 1000,
    "padding_tokens": 250,
    "documents": 40,
    "split_documents": 2,
    "split_tokens": 20,
}


@pytest.fixture
def facts() -> Facts:
    """Facts about 1,000 tokens of 40 documents."""
    return facts_of(packed={"packing": "best_fit", "packing_cost": COST})


def test_shares_are_of_documents_of_tokens_and_of_rows(facts: Facts) -> None:
    waste = waste_of(PackingCost(**COST))
    assert waste == Waste(split=0.05, in_split=0.02, padding=0.2)
    assert packing_table(facts).rows == [["best_fit", "125", "5.00%", "20.00%"]]
    assert packing_table(facts_of(packed={"sources": []})).rows == []


def test_packing_table_fits_a_narrow_terminal(facts: Facts) -> None:
    console = Console(file=io.StringIO(), width=64)
    print_table(console, packing_table(facts), "Packing")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[0] for line in lines if line] == [
        "Packing",
        "packing",
        "best_fit",
    ]
    assert lines[3].split()[1:] == ["125", "5.00%", "20.00%"]


def test_report_shows_packing_only_if_measured(
    facts: Facts,
) -> None:
    page = html_of(*packing(facts))
    assert "<td>best_fit</td>" in page
    assert "20.000%" in page
    assert packing(Facts()) == []
