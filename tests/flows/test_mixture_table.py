"""Tables of a mixture: requested and realised shares, phases, and tokens moved by
limits.
"""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from gristmill.flows.report.mixture import (
    mixture_notes,
    mixture_section,
    mixture_tables,
)
from gristmill.flows.report.terminal_summary import print_mixture
from tests.flows.rendered import facts_of, html_of

PACKED: dict[str, Any] = {
    "sources": ["web", "code"],
    "sequence_length": 16,
    "tokenizer": {"vocab_size": 300},
    "realised": {
        "web": {"tokens": 1200, "share": 0.75, "epochs": 0.5},
        "code": {"tokens": 400, "share": 0.25, "epochs": 4.0},
    },
    "requested": {
        "web": {"share": 0.6, "max_epochs": 1.0, "epochs": "min(cluster_size, 4)"},
        "code": {"share": 0.4, "max_epochs": 4.0},
    },
    "redistributed": {"web": 240, "code": -240},
    "shares": [
        {
            "until": 0.75,
            "rows": 75,
            "rows_per_source": [66, 9],
            "tokens": 1200,
            "requested": {"web": 0.8, "code": 0.2},
            "realised": {"web": 0.875, "code": 0.125},
        },
        {
            "until": 1.0,
            "rows": 25,
            "rows_per_source": [9, 16],
            "tokens": 400,
            "requested": {"web": 0.0, "code": 1.0},
            "realised": {"web": 0.375, "code": 0.625},
        },
    ],
}


def test_mixture_table_shows_tokens_moved_by_limits() -> None:
    mixture, _ = mixture_tables(facts_of(packed=PACKED))
    assert mixture.header == [
        "source",
        "tokens",
        "share",
        "requested",
        "moved",
        "epochs",
        "at most",
    ]
    assert mixture.rows == [
        ["web", "1,200", "75.00%", "60.00%", "+240", "0.50", "1"],
        ["code", "400", "25.00%", "40.00%", "-240", "4.00", "4"],
    ]
    assert mixture_notes(facts_of(packed=PACKED)) == [
        "web: epochs min(cluster_size, 4)"
    ]


def test_phase_table_lists_the_sources_of_each_phase() -> None:
    _, phases = mixture_tables(facts_of(packed=PACKED))
    assert phases.rows == [
        ["0% to 75%", "web", "1,050", "87.50%", "80.00%"],
        ["", "code", "150", "12.50%", "20.00%"],
        ["75% to 100%", "web", "150", "37.50%", "0.00%"],
        ["", "code", "250", "62.50%", "100.00%"],
    ]


def test_plain_mixture_has_no_moved_column_and_no_phase_table() -> None:
    plain_record = {
        **PACKED,
        "redistributed": {},
        "shares": PACKED["shares"][:1],
        "requested": {
            name: {"share": 0.5, "max_epochs": 1.0} for name in PACKED["sources"]
        },
    }
    (mixture,) = mixture_tables(facts_of(packed=plain_record))
    assert mixture.header == [
        "source",
        "tokens",
        "share",
        "requested",
        "epochs",
        "at most",
    ]
    assert mixture_notes(facts_of(packed=plain_record)) == []
    older_record = {
        key: value
        for key, value in plain_record.items()
        if key not in ("redistributed", "shares")
    }
    assert mixture_tables(facts_of(packed=older_record)) == [mixture]


def test_the_terminal_and_the_report_show_both_tables() -> None:
    terminal = StringIO()
    facts = facts_of(packed=PACKED)
    print_mixture(facts, Console(file=terminal, width=60))
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert "web      1,200  75.00%     60.00%   +240    0.50        1" in [
        line.rstrip() for line in lines
    ]
    html = html_of(mixture_section(facts))
    assert '<td class="n">-240</td>' in html
    assert "<td>75% to 100%</td><td>web</td>" in html
    assert "epochs min(cluster_size, 4)" in html
