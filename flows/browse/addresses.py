"""Addresses of the pages: the query of each kind of page as a model, links, and parsing
of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from gristmill.flows.pages.page_elements import Inline, Link, Links

DOCUMENTS = "documents"
"""Name in addresses of the corpus of a run, beside those of prepared examples."""
SEARCH_PAGE, CUTS_PAGE, CLUSTERS_PAGE, DOMAINS_PAGE = (
    "search",
    "cuts",
    "duplicates",
    "domains",
)
ROWS_PAGE, TRAINING_PAGE, EXAMPLES_PAGE = "rows", "training", "examples"
MOST_ROW = 2**62
OUTCOMES = ("kept", "dropped", "quarantined")
Name = Annotated[str, Field(max_length=200)]
Number = Annotated[int, Field(ge=0, le=MOST_ROW)]


class BadAddressError(ValueError):
    """An address with a parameter or a value that its page does not have."""


def address(*parts: object, **parameters: object) -> str:
    """A link to a page of this server; parameters without a value are left out."""
    query = {
        name: value
        for name, value in parameters.items()
        if value not in (None, "", False)
    }
    path = "/" + "/".join(quote(str(part), safe="") for part in parts)
    return f"{path}?{urlencode(query)}" if query else path


def corpus_parameter(corpus: str) -> str | None:
    """The parameter that names a corpus; None for the default one."""
    return None if corpus == DOCUMENTS else corpus


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


class Query(BaseModel):
    """Parameters of an address: the parts of its path, and its query. Empty fields of a
    form count as absent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, values: Any) -> Any:
        return {name: value for name, value in values.items() if value != ""}


class NoQuery(Query):
    """A page without parameters."""


class Listing(Query):
    """A listing that continues after this many entries."""

    after: Number = 0


class Search(Query):
    """Documents to list."""

    corpus: Name = DOCUMENTS
    words: Annotated[str, Field(max_length=1000)] | None = None
    source: Name | None = None
    language: Name | None = None
    outcome: Annotated[str, Field(pattern=f"^({'|'.join(OUTCOMES)})$")] | None = None
    step: Name | None = None
    reason: Name | None = None
    where: Annotated[str, Field(max_length=2000)] | None = None
    """SQL over the columns of a document, as `where` of a source."""
    column: Name | None = None
    least: float | None = None
    most: float | None = None
    after: Annotated[str, Field(pattern=r"^\d{1,6}-\d{1,12}$")] | None = None
    """Number of the shard and row where the search continues."""

    @model_validator(mode="after")
    def _bounds_of_a_column(self) -> Self:
        if self.column is None and (self.least is not None or self.most is not None):
            raise ValueError("a range is that of a measured column: choose one")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(
                f"no value is at least {self.least:g} and at most {self.most:g}"
            )
        return self

    def link(self, after: str | None = None) -> str:
        """The address of this search, continued after a place."""
        parameters = {**self.model_dump(exclude={"after"}), "after": after}
        return address(
            DOCUMENTS,
            **{name: value for name, value in parameters.items() if value != DOCUMENTS},
        )


class TextSearch(Query):
    """A text that documents are about, and whether they are ranked by meaning or by
    words alone.
    """

    text: Annotated[str, Field(max_length=2000)] | None = None
    by: Literal["meaning", "words"] | None = None


class Find(Query):
    """A document or an example, by its id, the first digits of it, or its locator."""

    wanted: Annotated[str, Field(min_length=1, max_length=4000)]


class OneDocument(Query):
    """A document, perhaps with the whole of a long text."""

    id: Annotated[str, Field(max_length=4000)]
    whole: bool = False


class OneCut(Query):
    """A rule, by its key."""

    key: Name


class Clusters(Listing):
    """The clusters of a step."""

    step: Name
    corpus: Name = DOCUMENTS


class OneCluster(Clusters):
    """A cluster, by its smallest id, and the document of it that is compared with its
    survivor.
    """

    cluster: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    member: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    whole: bool = False


class Rows(Listing):
    """The rows of a packed set: those of training, or a source's that are held out."""

    stage: Name
    held_out: Name | None = None


class OneStage(Query):
    """A stage."""

    stage: Name


class OneRow(Query):
    """A row of a packed set."""

    stage: Name
    row: Number
    held_out: Name | None = None
    tokens: bool = False
    """Each token by itself."""


class Training(Listing):
    """The steps of a training; `step` leads to one of them."""

    stage: Name
    step: Annotated[int, Field(ge=1, le=MOST_ROW)] | None = None


class OneStep(Query):
    """A training step."""

    stage: Name
    step: Annotated[int, Field(ge=1, le=MOST_ROW)]


AnyQuery = TypeVar("AnyQuery", bound=Query)


def read_query(model: type[AnyQuery], request: Request) -> AnyQuery:
    """The query of a request.

    Raises:
        BadAddressError: a parameter is missing, unknown, repeated, or has a value that
            is not allowed.
    """
    repeated = [
        name
        for name in request.query_params
        if len(request.query_params.getlist(name)) > 1
    ]
    if repeated:
        raise BadAddressError(f"{repeated[0]} is there twice; give it once")
    try:
        return model.model_validate({**request.query_params, **request.path_params})
    except ValidationError as error:
        raise BadAddressError(_describe(error, model)) from error


def _describe(error: ValidationError, model: type[Query]) -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return (
            f"this page does not know {name!r}; it takes "
            f"{', '.join(model.model_fields) or 'nothing'}"
        )
    message = str(first["msg"]).removeprefix("Value error, ")
    return f"{name}: {message} (got {str(first['input'])[:100]!r})" if name else message
