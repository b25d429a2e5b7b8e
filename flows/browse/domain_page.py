"""The page of domains: a map of documents by what they are about, and the size of each
domain.
"""

from __future__ import annotations

from gristmill.flows.browse.addresses import (
    DOCUMENTS,
    DOMAINS_PAGE,
    OneStage,
    Search,
    address,
)
from gristmill.flows.browse.browse_elements import tabs
from gristmill.flows.browse.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.pages.dot_map import draw_map
from gristmill.flows.pages.page_elements import Page, page_of
from gristmill.flows.report.document_sections import domain_table


def steps_with_domains(run: BrowsedRun) -> list[str]:
    """The committed steps that sorted documents into domains."""
    steps = run.columns(DOCUMENTS).steps if DOCUMENTS in run.corpora() else []
    return [step for step in steps if run.step(step).domains]


def domains_page(run: BrowsedRun, query: OneStage) -> Page:
    """The map of a step, and its domains with links to their documents."""
    steps = steps_with_domains(run)
    if query.stage not in steps:
        raise NotThereError(
            f"{query.stage} has sorted no documents by what they are about; steps that "
            f"have are {', '.join(steps) or 'none'}"
        )
    summary, measured = run.step(query.stage), run.columns(DOCUMENTS).measured
    column = next(
        name for name, place in measured.items() if place == (query.stage, "domain")
    )

    def documents_of(domain: int) -> str:
        return Search(where=f"{column} = {domain}").link()

    caption = (
        f"{len(summary.map):,} documents of the sample of {summary.sample:,}, along "
        "the two directions in which their vectors differ most. A number is that of a "
        "domain, in the middle of its documents."
    )
    return page_of(
        "Domains",
        tabs([(step, address(DOMAINS_PAGE, step)) for step in steps], query.stage),
        draw_map(summary.map, summary.domains, caption, documents_of),
        domain_table(summary, "of all documents", documents_of),
    )
