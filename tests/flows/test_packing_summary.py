"""The summary of a run's packing, with the costs of the other packings."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gristmill.flows.orchestration.cards import mixture_lines
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.mixture import PackingRow, Waste, packing, packing_rows
from gristmill.flows.report.terminal_summary import print_packing
from tests.flows.rendered import facts_of, html_of


def costs(
    rows: int, tokens: int, padding: int, dropped: int, split: int
) -> dict[str, int]:
    return {
        "rows": rows,
        "tokens": tokens,
        "padding_tokens": padding,
        "dropped_tokens": dropped,
        "documents": 40,
        "split_documents": split,
        "split_tokens": 10 * split,
    }


@pytest.fixture
def facts() -> Facts:
    """Facts about 1,000 tokens of 40 documents."""
    return facts_of(
        packed={
            "packing": "best_fit",
            "packings": {
                "stream": costs(100, 1000, 0, 0, 20),
                "stream_aligned": costs(70, 700, 0, 300, 20),
                "best_fit": costs(125, 1000, 250, 0, 2),
                "best_fit_aligned": costs(120, 900, 300, 100, 2),
            },
        }
    )


def test_shares_are_of_documents_of_tokens_and_of_rows(facts: Facts) -> None:
    rows = {row.packing: row for row in packing_rows(facts)}
    assert rows["best_fit"] == PackingRow(
        "best_fit",
        is_used=True,
        rows=125,
        waste=Waste(split=0.05, in_split=0.02, dropped=0.0, padding=0.2),
    )
    assert rows["stream_aligned"] == PackingRow(
        "stream_aligned",
        is_used=False,
        rows=70,
        waste=Waste(split=0.5, in_split=0.2, dropped=0.3, padding=0.0),
    )
    assert packing_rows(facts_of(packed={"sources": []})) == []


def test_packing_table_fits_a_narrow_terminal(facts: Facts) -> None:
    console = Console(file=io.StringIO(), width=64)
    print_packing(facts, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[0] for line in lines if line] == [
        "Packing",
        "packing",
        "best_fit",
    ]
    assert lines[3].split()[1:] == ["125", "5.00%", "0.00%", "20.00%"]


def test_card_shows_only_the_packing_in_use(facts: Facts) -> None:
    card = "\n".join(mixture_lines(facts))
    assert "| best_fit | 125 |" in card
    assert "stream" not in card


def test_report_shows_packing_only_if_measured(
    facts: Facts,
) -> None:
    page = html_of(*packing(facts))
    assert "<td>best_fit (used)</td>" in page
    assert "20.000%" in page
    assert packing(Facts()) == []
