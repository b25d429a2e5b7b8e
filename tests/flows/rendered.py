"""Sections of the report as they are shown: the HTML of a page's body, and its text."""

from __future__ import annotations

import re
from html import unescape

from gristmill.flows.pages.page_elements import Page, Part, Section
from gristmill.flows.pages.page_html import html_file
from gristmill.flows.report.document_sections import document_sections
from gristmill.flows.report.report_facts import Facts
from gristmill.flows.report.run_report import stage_sections
from gristmill.flows.stages.registry import STAGES


def sections_about(facts: Facts) -> list[Section | None]:
    """What the report says of the documents of stages that are called as in the registry."""
    return [*document_sections(facts), *stage_sections(facts, {name: STAGES[name] for name in facts["summaries"]})]


def html_of(*shown: Section | Part | None) -> str:
    """The body of a page with these sections or parts; long names unbroken."""
    sections = [one for one in shown if isinstance(one, Section)]
    parts = [one for one in shown if one is not None and not isinstance(one, Section)]
    body = html_file(Page("title", sections, parts)).partition("<body>")[2].replace("<wbr>", "")
    return body.partition("</h1>\n")[2].partition("</main>")[0].strip()


def text_of(*shown: Section | Part | None) -> str:
    """The words of it."""
    return " ".join(unescape(re.sub(r"<svg.*?</svg>|<[^>]+>", " ", html_of(*shown), flags=re.S)).split())
