"""Rendered sections of a report: the HTML of a page's body, and its text."""

from __future__ import annotations

import re
from html import unescape
from typing import Any, get_type_hints

from gristmill.flows.pages.page_elements import Page, Part, Section
from gristmill.flows.pages.page_html import html_file
from gristmill.flows.report.document_sections import document_sections
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.report import stage_sections
from gristmill.flows.report.stage_summaries import read_as
from gristmill.flows.stages.registry import STAGES

KINDS = get_type_hints(Facts)
UNREAD = ("training", "summaries")
"""Topics whose lines and summaries are read by what shows them."""


def facts_of(**topics: Any) -> Facts:
    """Return facts with these topics, given as JSON."""
    return Facts(
        **{
            name: topic if name in UNREAD else read_as(KINDS[name], topic)
            for name, topic in topics.items()
        }
    )


def sections_about(facts: Facts) -> list[Section | None]:
    """Return the report's sections on documents and on stages with the names of the
    registry.
    """
    return [
        *document_sections(facts),
        *stage_sections(facts, {name: STAGES[name] for name in facts.summaries}),
    ]


def html_of(*elements: Section | Part | None) -> str:
    """Return the body of a page with these sections or parts; long names are
    unbroken.
    """
    sections = [element for element in elements if isinstance(element, Section)]
    parts = [
        element
        for element in elements
        if element is not None and not isinstance(element, Section)
    ]
    body = (
        html_file(Page("title", sections, parts))
        .partition("<body>")[2]
        .replace("<wbr>", "")
    )
    return body.partition("</h1>\n")[2].partition("</main>")[0].strip()


def text_of(*elements: Section | Part | None) -> str:
    """Return the visible text of these sections or parts."""
    return " ".join(
        unescape(
            re.sub(r"<svg.*?</svg>|<[^>]+>", " ", html_of(*elements), flags=re.S)
        ).split()
    )
