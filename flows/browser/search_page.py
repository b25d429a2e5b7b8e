"""The pages that find documents by subject: a search by meaning and by words, and the
domains.
"""

from __future__ import annotations

from typing import Literal

from gristmill.dataprep.words.bm25_scan import terms_of
from gristmill.flows.browser.addresses import (
    DOCUMENTS,
    BadAddressError,
    LongText,
    Name,
    Search,
    address,
)
from gristmill.flows.browser.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.browser.elements import document_entry, listing_of, tabs
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
    is_partial = results.with_words is not None and (
        results.with_words < results.documents
    )
    command = run.session.command("search", "TEXT")
    words = [word for term in terms_of(text) for word in term.split()]
    entries = [
        document_entry(
            hit.id,
            hit.url or hit.locator,
            (hit.kept, hit.dropped_by, hit.reason),
            hit.source,
            hit.characters,
            hit.snippet,
            words,
            hit.ranks(),
        )
        for hit in results.hits
    ]
    return page_of(
        "Search",
        form,
        f"{results.described()}.",
        f"All are looked through by: `{command}`" if is_partial else None,
        results.note,
        listing_of(entries, "None of them fits."),
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
