"""Addresses of the pages: links, and kinds of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ConfigDict, Field

from gristmill.flows.pages.page_elements import Inline, Link, Links

DOCUMENTS = "documents"
"""Name in addresses of the corpus of a run, beside those of prepared examples."""
Outcome = Literal["kept", "dropped", "quarantined"]
Name = Annotated[str, Field(max_length=200)]
Number = Annotated[int, Field(ge=0, le=2**62)]
Step = Annotated[int, Field(ge=1, le=2**62)]
LongText = Annotated[str, Field(max_length=2000)]
Address = Annotated[str, Field(max_length=4000)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class BadAddressError(ValueError):
    """An address with a parameter or a value that its page does not have."""


def address(*parts: object, **parameters: object) -> str:
    """A link to a page of this server; parameters without a value, and the corpus that
    is the default, are left out.
    """
    query = urlencode(
        {
            name: value
            for name, value in parameters.items()
            if value and (name, value) != ("corpus", DOCUMENTS)
        }
    )
    path = "/" + "/".join(quote(str(part), safe="") for part in parts)
    return f"{path}?{query}" if query else path


def page_links(total: int, after: int, size: int, link: Callable[[int], str]) -> Links:
    """Links from a page of `size` of `total` entries to the page before and the next
    one.

    Args:
        total: entries of the listing.
        after: entries before this page.
        size: entries of a page.
        link: address of the page after some entries.
    """
    links: list[Inline] = []
    if after:
        links.append(Link("← before", link(max(0, after - size)), rel="prev"))
    if after + size < total:
        links.append(Link("next →", link(after + size), rel="next"))
    return Links(links)


class Search(BaseModel):
    """Documents to list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpus: Name = DOCUMENTS
    source: Name | None = None
    language: Name | None = None
    outcome: Outcome | None = None
    step: Name | None = None
    reason: Name | None = None
    where: LongText | None = None
    """SQL over the columns of a document, as `where` of a source."""
    after: Annotated[str, Field(pattern=r"^\d{1,6}-\d{1,12}$")] | None = None
    """Number of the shard and row where the search continues."""

    def link(self, after: str | None = None) -> str:
        """The address of this search, continued after a place."""
        parameters = {**self.model_dump(exclude_defaults=True), "after": after}
        return address(DOCUMENTS, **parameters)
