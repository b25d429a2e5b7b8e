"""Tables of a report in a browser: sorted by a click or a key, searchable if they are
long, with one script.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gristmill.flows.pages.page_elements import Page, Section, Table
from gristmill.flows.pages.page_html import html_file

ROWS = [
    [f"rule {number}", f"{number * 700:,}", "≈ 3" if number == 3 else ""]
    for number in (3, 1, 12, 2, *range(20, 30))
]


@pytest.fixture
def shown(tmp_path: Path, browser: Any) -> Iterator[Any]:
    table = Table(["rule", "documents", "tokens kept"], ROWS, {1, 2})
    (tmp_path / "report.html").write_text(
        html_file(
            Page(
                "x",
                [
                    Section("Rules", [table]),
                    Section(
                        "Few",
                        [
                            Table(
                                ["<script>document.title = 'taken'</script>"],
                                [["one"], ["two"]],
                            )
                        ],
                    ),
                ],
            )
        )
    )
    with closing(browser.new_context()) as context:
        page = context.new_page()
        page.goto(f"file://{tmp_path}/report.html")
        assert page.title() == "x - gristmill"
        yield page


def column(page: Any, number: int) -> list[str]:
    cells = page.locator(
        f"table >> nth=0 >> tr:visible > td:nth-child({number})"
    ).all_inner_texts()
    return [cell.strip() for cell in cells]


def test_a_click_sorts_numbers_by_value_and_another_turns_the_order(shown: Any) -> None:
    assert column(shown, 1) == [row[0] for row in ROWS], "the order of the file"
    shown.click("th:has-text('documents')")
    assert column(shown, 2)[:4] == ["700", "1,400", "2,100", "8,400"]
    assert shown.get_attribute("th:has-text('documents')", "aria-sort") == "ascending"
    shown.click("th:has-text('documents')")
    assert column(shown, 2)[0] == "20,300"
    shown.focus("th:has-text('rule')")
    shown.keyboard.press("Enter")
    assert column(shown, 1)[:3] == ["rule 1", "rule 12", "rule 2"]
    shown.click("th:has-text('tokens kept')")
    assert column(shown, 3)[0] == "≈ 3", "cells without a number come last"


def test_a_long_table_is_searched_and_a_short_one_has_no_field_for_it(
    shown: Any,
) -> None:
    assert shown.locator("input[type=search]").count() == 1
    shown.fill("input[type=search]", "RULE 2")
    assert set(column(shown, 1)) == {
        "rule 2",
        *(f"rule {number}" for number in range(20, 30)),
    }
    shown.fill("input[type=search]", "")
    assert len(column(shown, 1)) == len(ROWS)
