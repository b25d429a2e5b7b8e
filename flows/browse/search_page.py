"""The page that finds documents by meaning and by words, and shows whether each was
kept.
"""

from __future__ import annotations

from gristmill.dataprep.words.bm25_scan import terms_of
from gristmill.flows.browse.addresses import (
    DOCUMENTS,
    SEARCH_PAGE,
    BadAddressError,
    TextSearch,
    address,
)
from gristmill.flows.browse.browse_elements import document_note, highlighted, verdict
from gristmill.flows.browse.browsed_run import BrowsedRun
from gristmill.flows.pages.page_elements import (
    Button,
    Choice,
    Entry,
    Field,
    Form,
    Link,
    Listing,
    Note,
    Page,
    Part,
)
from gristmill.flows.questions.search import SearchError, search

ON_PAGE = 25
MOST_BYTES = 256 << 20
"""Texts that are searched for words: some seconds. The command searches all."""


def search_page(run: BrowsedRun, query: TextSearch) -> Page:
    """The documents that a text is about; the form alone without a text."""
    run.corpus(DOCUMENTS)
    text = query.text
    fields: list[Field | Choice] = [
        Field(
            "text",
            "text",
            text or "",
            'a sentence, or words; "several between quotes"',
            2000,
            True,
            is_required=True,
        ),
        Choice(
            "by", "by", {"": ["meaning", "words"]}, query.by or "", any_label="both"
        ),
    ]
    form = Form(address(SEARCH_PAGE), fields, [Button("Search")], layout="filters")
    if text is None:
        hint = (
            "The documents nearest in meaning, and those with the words, in one "
            "list: kept or not."
        )
        return Page("Search", parts=[form, Note(hint)])
    try:
        results = run.cached(
            ("search", query),
            lambda: search(run.session, text, query.by, ON_PAGE, MOST_BYTES),
        )
    except SearchError as error:
        raise BadAddressError(str(error)) from error
    parts: list[Part] = [form, Note(f"{results.described()}.")]
    if results.with_words is not None and results.with_words < results.documents:
        parts.append(
            Note(
                f"All are looked through by: `{run.session.command('search', 'TEXT')}`"
            )
        )
    if results.note:
        parts.append(Note(results.note))
    words = [word for term in terms_of(text) for word in term.split()]
    entries = []
    for hit in results.hits:
        judged = verdict(hit.kept, hit.dropped_by, hit.reason)
        note = document_note(judged, hit.source, hit.characters, hit.id, hit.ranks())
        title = Link(hit.url or hit.locator, address(DOCUMENTS, hit.id))
        entries.append(Entry(title, highlighted(hit.snippet, words), note))
    parts.append(
        Listing("", entries) if entries else Note("None of them fits.", "plain")
    )
    return Page("Search", parts=parts)
