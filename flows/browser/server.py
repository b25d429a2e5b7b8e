"""`gristmill browse`: the pages of a run's data on the loopback address. The
server answers only GET and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from http import HTTPStatus
from inspect import signature
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from gristmill.core.secrets import mask_known, mask_text
from gristmill.core.store import CorruptError
from gristmill.dataprep.documents import DamagedTableError, MisalignedError
from gristmill.dataprep.edits import BadEditError
from gristmill.dataprep.where_sql import ExpressionError
from gristmill.flows.browser.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.browser.cluster_pages import cluster_page, clusters_page
from gristmill.flows.browser.cut_pages import cut_page, cuts_page
from gristmill.flows.browser.document_list import documents_page
from gristmill.flows.browser.document_page import document_page
from gristmill.flows.browser.overview import navigation, overview_page
from gristmill.flows.browser.row_pages import row_page, rows_page
from gristmill.flows.browser.search_page import domains_page, search_page
from gristmill.flows.browser.step_pages import (
    example_page,
    step_page,
    traced_example,
    training_page,
)
from gristmill.flows.pages.addresses import (
    DOCUMENTS,
    Address,
    BadAddressError,
    address,
)
from gristmill.flows.pages.page_elements import (
    Field,
    Form,
    Link,
    Links,
    Note,
    Page,
    page_of,
)
from gristmill.flows.pages.page_html import served_html
from gristmill.flows.pages.page_server import GuardedApp
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
"""Errors of reading outputs that are damaged or missing."""
ABSENT = (NotThereError, DocumentNotFoundError, TraceError)
REFUSALS: dict[HTTPStatus, tuple[type[Exception], ...]] = {
    HTTPStatus.BAD_REQUEST: (BadAddressError, ExpressionError),
    HTTPStatus.NOT_FOUND: (*ABSENT, HTTPException),
    HTTPStatus.INTERNAL_SERVER_ERROR: (*DAMAGED, Exception),
}


def find(run: BrowsedRun, wanted: Address) -> str:
    """The address of a document or an example, by its id, the first digits of it, or
    its locator.

    Raises:
        DocumentNotFoundError: nothing, or more than one, fits.
    """
    name = wanted.strip()
    try:
        return address(DOCUMENTS, history(run.session, name).id)
    except DocumentNotFoundError as not_a_document:
        try:
            traced, _ = traced_example(run, name)
        except ABSENT:
            raise not_a_document from None
    return address("examples", traced.id)


PAGES: dict[str, Callable[..., Page | str]] = {
    "/": overview_page,
    "/documents": documents_page,
    "/documents/{id}": document_page,
    "/search": search_page,
    "/domains/{step}": domains_page,
    "/cuts": cuts_page,
    "/cuts/{key}": cut_page,
    "/duplicates/{step}": clusters_page,
    "/duplicates/{step}/{cluster}": cluster_page,
    "/rows/{stage}": rows_page,
    "/rows/{stage}/{row}": row_page,
    "/training/{stage}": training_page,
    "/training/{stage}/{step}": step_page,
    "/examples/{id}": example_page,
    "/find": find,
}
"""Address of a kind of page -> function of a run and the address's parameters; returns
the page, or the address to redirect to.
"""


def make_app(run: BrowsedRun) -> GuardedApp:
    """The application that shows a run."""
    handlers: dict[Any, Any] = {
        error: partial(_refuse, run, status)
        for status, errors in REFUSALS.items()
        for error in errors
    }
    routes = [
        Route(path, partial(_answer, run, _checked(make)), methods=["GET"])
        for path, make in PAGES.items()
    ]
    return GuardedApp(routes, handlers)


def _checked(make: Callable[..., Page | str]) -> Callable[..., Any]:
    """A function that checks the parameters of a page and returns a call that makes it.

    A page is made outside of the check: a value in an output that is not valid is not
    an error of the address.
    """

    @validate_call(config=ConfigDict(arbitrary_types_allowed=True))
    @wraps(make)
    def bind(*arguments: object, **parameters: object) -> Any:
        return partial(make, *arguments, **parameters)

    return bind


def _answer(run: BrowsedRun, check: Callable[..., Any], request: Request) -> Response:
    """A page, or a redirection.

    Args:
        run: that is shown.
        check: checks the parameters (see `_checked`).
        request: of the page.

    Raises:
        BadAddressError: a parameter is missing, unknown, or has a value that is not
            allowed. Empty fields of a form count as absent.
    """
    parameters: dict[str, object] = {
        name: value
        for name, value in {**request.query_params, **request.path_params}.items()
        if value != ""
    }
    if "query" in signature(check).parameters:
        parameters = {"query": parameters}
    try:
        make_page = check(run, **parameters)
    except ValidationError as error:
        sentences = (
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors()
        )
        raise BadAddressError("; ".join(sentences)) from error
    page = make_page()
    if isinstance(page, str):
        return RedirectResponse(page, HTTPStatus.SEE_OTHER)
    return _respond(run, page)


def _refuse(
    run: BrowsedRun, status: HTTPStatus, request: Request, error: Exception
) -> Response:
    """A page with the sentence of an error; the terminal gets the traceback of an
    unexpected one.
    """
    text = " ".join(str(error).split())
    if isinstance(error, HTTPException):
        status, text = HTTPStatus(error.status_code), error.detail
    elif status is HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, DAMAGED):
        text = f"{type(error).__name__}: {text}"
    warning = Note([mask_text(text) or type(error).__name__], "warning")
    return _respond(run, page_of(status.phrase, warning), status)


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
    form = Form("/find", [lookup], "Find", layout="find")
    page = replace(page, header=[Links(links), form], site=run.name)
    return HTMLResponse(mask_known(served_html(page)), status)
