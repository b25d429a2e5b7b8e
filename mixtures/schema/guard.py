"""The section `guard`: the largest loss that a step may cause unnoticed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.base import Fraction, Section

LEAST_DOCUMENTS = 10
"""Documents that a source, domain or language must have for its losses to be
recorded.
"""


class Guard(Section):
    """Check of every step for sources, domains and languages that lose most of their
    documents.

    It never changes a document, and moving it makes no step run again.
    """

    max_loss: Fraction = 0.9
    """Largest share of the documents of a source, a domain (host of the locator) or a
    language that a step may drop. Documents that a rule drops for the same property,
    such as those in a language that `langid` does not keep, do not count.
    """
    min_documents: Annotated[int, Field(ge=LEAST_DOCUMENTS)] = 20
    """Groups of fewer documents are not checked."""
    action: Literal["warn", "error", "ignore"] = "warn"
    """Consequence of a larger loss: a warning, an error after which no later stage
    runs, or nothing. `gristmill losses` lists it in any case.
    """

    def is_exceeded(self, read: int, dropped: int) -> bool:
        """Return True if a group of `read` documents lost more than allowed."""
        return read >= self.min_documents and dropped > self.max_loss * read
