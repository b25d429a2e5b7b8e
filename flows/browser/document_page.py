"""The page of one document: its history with links to cuts, lists and duplicates."""

from __future__ import annotations

from gristmill.flows.browser.browsed_run import BrowsedRun
from gristmill.flows.browser.cluster_pages import steps_with_clusters
from gristmill.flows.browser.cut_pages import link_of_cut
from gristmill.flows.pages.addresses import DOCUMENTS, Address, Search, address
from gristmill.flows.pages.page_elements import Page
from gristmill.flows.questions.explain import (
    BEFORE_STEP,
    Explanation,
    Judgement,
    history,
)

MOST_CHARACTERS = 30_000
"""Code points of a text that are shown, unless the query asks for the whole."""


def document_page(run: BrowsedRun, id: Address, whole: bool = False) -> Page:
    """A document's history, with its text as it was read and as it is now.

    Raises:
        gristmill.flows.questions.find_documents.DocumentNotFoundError: nothing, or more
            than one document, fits.
    """
    document = history(run.session, id, True)
    return document.page(
        lambda judged: _links(run, document, judged),
        None if whole else MOST_CHARACTERS,
    )


def _links(run: BrowsedRun, document: Explanation, judged: Judgement) -> dict[str, str]:
    """Text -> address of the cut, the list and the cluster of a verdict."""
    corpus, values = document.corpus, judged.values
    step = judged.stage.rpartition(BEFORE_STEP)[2]
    links = {}
    if corpus == DOCUMENTS:
        links["both sides of this cut"] = link_of_cut(run, step, judged.reason)
    if not judged.keep:
        search = Search(corpus=corpus, step=step, reason=judged.reason)
        links["others dropped for it"] = search.link()
    survivor = values.get("duplicate_of")
    if survivor:
        links["what was kept for it"] = address(DOCUMENTS, survivor)
    cluster = values.get("cluster")
    has_twins = survivor or (values.get("cluster_size") or 1) > 1
    if cluster and has_twins and (corpus, step) in steps_with_clusters(run):
        member = None if judged.keep else document.id
        links["its duplicates"] = address(
            "duplicates", step, cluster, corpus=corpus, member=member
        )
    return links
