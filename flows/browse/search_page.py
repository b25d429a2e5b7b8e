"""The page that looks for documents by meaning and by words, and says of each whether it was kept."""

from __future__ import annotations

from typing import Any

from gristmill.dataprep.words.bm25_scan import terms_of
from gristmill.flows.browse.addresses import DOCUMENTS, BadAddressError, ByMeaning, address
from gristmill.flows.browse.browsed_run import BrowsedRun
from gristmill.flows.questions.search import SearchError, described, marked, ranks, search

SEARCH_PAGE = "search"
ON_PAGE = 25
MOST_BYTES = 256 << 20
"""Of texts in which words are looked for: some seconds. The command looks through all."""


def search_page(run: BrowsedRun, asked: ByMeaning) -> dict[str, Any]:
    """The documents that a text is about; the form alone where nothing is asked for."""
    run.corpus(DOCUMENTS)
    if asked.text is None:
        return {"asked": asked, "found": None}
    try:
        text = asked.text
        found = run.once(("search", asked), lambda: search(run.session, text, asked.by, ON_PAGE, MOST_BYTES))
    except SearchError as error:
        raise BadAddressError(str(error)) from error
    words = [word for term in terms_of(asked.text) for word in term.split()]
    more = found["with_words"] is not None and found["with_words"] < found["documents"]
    return {
        "asked": asked,
        "found": found,
        "said": described(found),
        "command": run.session.command("search", "TEXT") if more else None,
        "hits": [
            {
                **hit,
                "link": address(DOCUMENTS, hit["id"]),
                "excerpt": marked(hit["snippet"], words),
                "ranks": ranks(hit),
            }
            for hit in found["hits"]
        ],
    }
