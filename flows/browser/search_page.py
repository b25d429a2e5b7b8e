"""The pages that find documents by subject: a search by meaning and by words, and the
domains.
"""

from __future__ import annotations

from typing import Literal

from gristmill.flows.browser.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.pages.addresses import (
    DOCUMENTS,
    BadAddressError,
    LongText,
    Name,
    Search,
    address,
)
from gristmill.flows.pages.document_elements import tabs
from gristmill.flows.pages.page_elements import (
    Choice,
    Field,
    Form,
    Page,
    page_of,
)
from gristmill.flows.questions.search import SearchError, search
from gristmill.flows.report.document_sections import domain_table

ON_PAGE = 25
MOST_BYTES = 256 << 20
"""Texts that are searched for words: some seconds. The command searches all."""


def search_page(
    run: BrowsedRun,
    text: LongText | None = None,
    by: Literal["meaning", "words"] | None = None,
) -> Page:
    """The documents that a text is about, ranked by meaning, words or both; the form
    alone without a text.
    """
    run.corpus(DOCUMENTS)
    hint = 'a sentence, or words; "several between quotes"'
    fields: list[Field | Choice] = [
        Field("text", "text", text or "", hint, 2000, True, is_required=True),
        Choice("by", "by", {"": ["meaning", "words"]}, by or "", any_label="both"),
    ]
    form = Form(address("search"), fields, "Search", layout="filters")
    if text is None:
        intro = (
            "The documents nearest in meaning, and those with the words, in one list: "
            "kept or not."
        )
        return page_of("Search", form, intro)
    try:
        results = run.cached(
            ("search", text, by),
            lambda: search(run.session, text, by, ON_PAGE, MOST_BYTES),
        )
    except SearchError as error:
        raise BadAddressError(str(error)) from error
    is_partial = (results.with_words or results.documents) < results.documents
    command = run.session.command("search", "TEXT")
    return page_of(
        "Search",
        form,
        results.parts(),
        f"All are looked through by: `{command}`" if is_partial else None,
    )


def steps_with_domains(run: BrowsedRun) -> list[str]:
    """The committed steps that sorted documents into domains."""
    steps = run.columns(DOCUMENTS).steps if DOCUMENTS in run.corpora() else []
    return [step for step in steps if run.step(step).domains]


def domains_page(run: BrowsedRun, step: Name) -> Page:
    """The domains of a step with links to their documents."""
    steps = steps_with_domains(run)
    if step not in steps:
        raise NotThereError(
            f"{step} has sorted no documents by what they are about; steps that have "
            "are",
            steps,
        )
    summary, measured = run.step(step), run.columns(DOCUMENTS).measured
    column = next(name for name, place in measured.items() if place == (step, "domain"))

    def documents_of(domain: int) -> str:
        return Search(where=f"{column} = {domain}").link()

    return page_of(
        "Domains",
        tabs({name: address("domains", name) for name in steps}, step),
        domain_table(summary, "of all documents", documents_of),
    )
