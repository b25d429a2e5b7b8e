"""`gristmill browse`: the pages of a run's data on the loopback address. Nothing but
GET is answered, nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gristmill.core.secrets import mask_text
from gristmill.core.store import CorruptError
from gristmill.dataprep.documents import DamagedTableError, MisalignedError
from gristmill.dataprep.edits import BadEditError
from gristmill.dataprep.where_sql import ExpressionError
from gristmill.flows.browse import addresses
from gristmill.flows.browse.addresses import (
    CLUSTERS_PAGE,
    CUTS_PAGE,
    DOCUMENTS,
    DOMAINS_PAGE,
    EXAMPLES_PAGE,
    ROWS_PAGE,
    SEARCH_PAGE,
    TRAINING_PAGE,
    BadAddressError,
    Query,
    address,
    read_query,
)
from gristmill.flows.browse.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.browse.cluster_pages import cluster_page, clusters_page
from gristmill.flows.browse.cut_pages import cut_page, cuts_page
from gristmill.flows.browse.document_list import documents_page
from gristmill.flows.browse.document_page import document_page
from gristmill.flows.browse.domain_page import domains_page
from gristmill.flows.browse.overview import navigation, overview_page
from gristmill.flows.browse.row_pages import row_page, rows_page
from gristmill.flows.browse.search_page import search_page
from gristmill.flows.browse.step_pages import (
    example_page,
    step_page,
    traced_example,
    training_page,
)
from gristmill.flows.pages.page_elements import (
    Button,
    Field,
    Form,
    Link,
    Links,
    Note,
    Page,
    page_of,
)
from gristmill.flows.pages.page_server import GuardedApp, page_app, page_response
from gristmill.flows.questions.explain import history
from gristmill.flows.questions.find_documents import DocumentNotFoundError
from gristmill.flows.questions.training_reads import TraceError
from gristmill.tokenize.packed_files import PackedSetError

DAMAGED = (
    DamagedTableError,
    MisalignedError,
    BadEditError,
    CorruptError,
    PackedSetError,
    OSError,
)
"""Errors of reading outputs that are not as they were written, or are gone."""
ABSENT = (NotThereError, DocumentNotFoundError, TraceError)
REFUSALS = {
    HTTPStatus.BAD_REQUEST: (BadAddressError, ExpressionError),
    HTTPStatus.NOT_FOUND: ABSENT,
    HTTPStatus.INTERNAL_SERVER_ERROR: DAMAGED,
}
ERROR_TITLES = {
    HTTPStatus.BAD_REQUEST: "Not understood",
    HTTPStatus.NOT_FOUND: "Not found",
    HTTPStatus.INTERNAL_SERVER_ERROR: "Cannot be read",
}


@dataclass(frozen=True)
class PageRoute:
    """A kind of page.

    Attributes:
        path: its address, with the names of its parts.
        query: its parameters.
        make: makes the page, or the address that it leads to.
    """

    path: str
    query: type[Query]
    make: Callable[[BrowsedRun, Any], Page | str]


def make_app(run: BrowsedRun) -> GuardedApp:
    """The application that shows a run."""
    handlers: dict[Any, Any] = {
        error: partial(_refuse, run, status)
        for status, errors in REFUSALS.items()
        for error in errors
    }
    handlers[HTTPException] = partial(_answer_http_error, run)
    handlers[Exception] = partial(_answer_unexpected_error, run)
    routes = [
        Route(route.path, partial(_answer, run, route), methods=["GET"])
        for route in ROUTES
    ]
    return page_app(routes, handlers)


def _answer(run: BrowsedRun, route: PageRoute, request: Request) -> Response:
    page = route.make(run, read_query(route.query, request))
    return (
        RedirectResponse(page, HTTPStatus.SEE_OTHER)
        if isinstance(page, str)
        else _respond(run, page)
    )


def find(run: BrowsedRun, query: addresses.Find) -> str:
    """The address of a document or an example, by its id or locator.

    Raises:
        DocumentNotFoundError: nothing, or more than one, fits.
    """
    name = query.wanted.strip()
    try:
        return address(DOCUMENTS, history(run.session, name).id)
    except DocumentNotFoundError as not_a_document:
        try:
            traced, _ = traced_example(run, name)
        except ABSENT:
            raise not_a_document from None
    return address(EXAMPLES_PAGE, traced.id)


ROUTES = (
    PageRoute("/", addresses.NoQuery, overview_page),
    PageRoute(f"/{DOCUMENTS}", addresses.Search, documents_page),
    PageRoute(f"/{DOCUMENTS}/{{id}}", addresses.OneDocument, document_page),
    PageRoute(f"/{SEARCH_PAGE}", addresses.TextSearch, search_page),
    PageRoute(f"/{DOMAINS_PAGE}/{{stage}}", addresses.OneStage, domains_page),
    PageRoute(f"/{CUTS_PAGE}", addresses.NoQuery, cuts_page),
    PageRoute(f"/{CUTS_PAGE}/{{key}}", addresses.OneCut, cut_page),
    PageRoute(f"/{CLUSTERS_PAGE}/{{step}}", addresses.Clusters, clusters_page),
    PageRoute(
        f"/{CLUSTERS_PAGE}/{{step}}/{{cluster}}", addresses.OneCluster, cluster_page
    ),
    PageRoute(f"/{ROWS_PAGE}/{{stage}}", addresses.Rows, rows_page),
    PageRoute(f"/{ROWS_PAGE}/{{stage}}/{{row}}", addresses.OneRow, row_page),
    PageRoute(f"/{TRAINING_PAGE}/{{stage}}", addresses.Training, training_page),
    PageRoute(f"/{TRAINING_PAGE}/{{stage}}/{{step}}", addresses.OneStep, step_page),
    PageRoute(f"/{EXAMPLES_PAGE}/{{id}}", addresses.OneDocument, example_page),
    PageRoute("/find", addresses.Find, find),
)


def _refuse(
    run: BrowsedRun, status: HTTPStatus, request: Request, error: Exception
) -> Response:
    """A page with the sentence of an error."""
    text = mask_text(" ".join(str(error).split())) or type(error).__name__
    return _respond_error(run, ERROR_TITLES[status], text, status)


def _answer_http_error(
    run: BrowsedRun, request: Request, error: HTTPException
) -> Response:
    texts = {
        HTTPStatus.NOT_FOUND: f"there is no page {request.url.path}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method} is not answered here: "
        "pages are read with GET, and "
        "nothing is changed",
    }
    status = HTTPStatus(error.status_code)
    return _respond_error(
        run,
        ERROR_TITLES.get(status, "Refused"),
        texts.get(status, error.detail),
        status,
    )


def _answer_unexpected_error(
    run: BrowsedRun, request: Request, error: Exception
) -> Response:
    """A sentence about an unexpected error; the terminal gets the traceback."""
    text = mask_text(f"this page cannot be made: {type(error).__name__}: {error}")
    return _respond_error(
        run, "Cannot be shown", text, HTTPStatus.INTERNAL_SERVER_ERROR
    )


def _respond_error(
    run: BrowsedRun, title: str, text: str, status: HTTPStatus
) -> Response:
    return _respond(run, page_of(title, Note([text], "warning")), status)


def _respond(
    run: BrowsedRun, page: Page, status: HTTPStatus = HTTPStatus.OK
) -> Response:
    try:
        links = navigation(run)
    except DAMAGED:
        links = [Link("overview", "/")]
    lookup = Field(
        "wanted", placeholder="id or locator of a document", most=4000, is_required=True
    )
    form = Form("/find", [lookup], [Button("Find")], layout="find")
    page = replace(page, header=[Links(links), form], site=run.name)
    return page_response(page, status)
