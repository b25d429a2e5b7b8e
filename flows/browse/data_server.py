"""`gristmill browse`: the pages of a run's data, on the loopback address alone.

What is shown was written by strangers. Templates escape every value, a policy lets browsers load nothing but the style
sheet of this server and run nothing at all, and other pages can neither frame a page of it nor read one: requests that
name another host, or that another site's page makes, are refused. Nothing but GET is answered, and nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from gristmill.core.secrets import mask_known, mask_text
from gristmill.core.store import CorruptError
from gristmill.dataprep.documents import DamagedTableError, MisalignedError
from gristmill.dataprep.edits import BadEditError
from gristmill.dataprep.where_sql import ExpressionError
from gristmill.flows.browse import addresses
from gristmill.flows.browse.addresses import DOCUMENTS, Asked, BadAddressError, address, asked
from gristmill.flows.browse.browsed_run import BrowsedRun, NotThereError
from gristmill.flows.browse.cluster_pages import CLUSTERS_PAGE, cluster_page, clusters_page
from gristmill.flows.browse.cut_pages import CUTS_PAGE, cut_page, cuts_page
from gristmill.flows.browse.document_list import documents_page
from gristmill.flows.browse.document_page import document_page
from gristmill.flows.browse.domain_page import DOMAINS_PAGE, domains_page
from gristmill.flows.browse.overview import navigation, overview_page
from gristmill.flows.browse.row_pages import EXAMPLES_PAGE, ROWS_PAGE, TRAINING_PAGE, row_page, rows_page
from gristmill.flows.browse.search_page import SEARCH_PAGE, search_page
from gristmill.flows.browse.step_pages import example_page, step_page, training_page
from gristmill.flows.questions.explain import history
from gristmill.flows.questions.find_documents import DocumentNotFoundError
from gristmill.flows.questions.training_reads import TraceError
from gristmill.flows.report.page_elements import DARK, LIGHT, environment
from gristmill.flows.report.pictures import COLOURS
from gristmill.tokenize.packed_files import PackedSetError

if TYPE_CHECKING:
    from jinja2 import Environment

HOSTS = ["127.0.0.1", "localhost"]
STYLE = "/style.css"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
DAMAGED = (DamagedTableError, MisalignedError, BadEditError, CorruptError, PackedSetError, OSError)
"""What reading raises of outputs that are not as they were written, or are gone."""
ABSENT = (NotThereError, DocumentNotFoundError, TraceError)
Make = Callable[[BrowsedRun, Any], Mapping[str, Any] | str]
"""What a page shows, or the address that it leads to."""


@dataclass(frozen=True)
class Page:
    """A kind of page.

    Attributes:
        path: its address, with names of what is in it.
        takes: what may be asked of it.
        make: what it shows.
        template: how it looks.
    """

    path: str
    takes: type[Asked]
    make: Make
    template: str


def make_app(run: BrowsedRun) -> Guarded:
    """The application that shows a run."""
    routes = [Route(page.path, partial(_answer, run, page), methods=["GET"]) for page in PAGES]
    style = style_sheet()
    routes += [Route(STYLE, lambda request: PlainTextResponse(style, media_type="text/css"), methods=["GET"])]
    handlers: dict[Any, Any] = {
        BadAddressError: partial(_refused, run, HTTPStatus.BAD_REQUEST),
        ExpressionError: partial(_refused, run, HTTPStatus.BAD_REQUEST),
        HTTPException: partial(_no_page, run),
        Exception: partial(_failed, run),
        **{kind: partial(_refused, run, HTTPStatus.NOT_FOUND) for kind in ABSENT},
        **{kind: partial(_refused, run, HTTPStatus.INTERNAL_SERVER_ERROR) for kind in DAMAGED},
    }
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    # Outside of everything: Starlette answers what nobody has thought of before its own middleware.
    return Guarded(Starlette(routes=routes, middleware=[hosts], exception_handlers=handlers))


class Guarded:
    """The pages with the headers that keep them to themselves; what a page of another site asks for is refused.

    Args:
        app: what answers.
        headers: of each answer.
    """

    def __init__(self, app: Any, headers: Mapping[str, str] = HEADERS) -> None:
        self._app, self._headers = app, headers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in self._headers.items()),
                ]
            await send(message)

        told = dict(scope.get("headers", ()))
        foreign = told.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        # Who follows a link from elsewhere sees the page; what a page loads into itself it does not get.
        if scope["type"] == "http" and foreign and told.get(b"sec-fetch-mode") != b"navigate":
            refusal = PlainTextResponse("pages of other sites get nothing from here", HTTPStatus.FORBIDDEN)
            await refusal(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


def _answer(run: BrowsedRun, page: Page, request: Request) -> Response:
    made = page.make(run, asked(page.takes, request))
    return RedirectResponse(made, HTTPStatus.SEE_OTHER) if isinstance(made, str) else _html(run, page.template, made)


def find(run: BrowsedRun, asked: addresses.Find) -> str:
    """The address of a document or an example, by its id or locator.

    Raises:
        DocumentNotFoundError: there is none, or more than one.
    """
    wanted = asked.wanted.strip()
    try:
        return address(DOCUMENTS, history(run.session, wanted)["id"])
    except DocumentNotFoundError as not_a_document:
        try:
            return address(EXAMPLES_PAGE, example_page(run, addresses.OneDocument(id=wanted))["id"])
        except ABSENT:
            raise not_a_document from None


PAGES = (
    Page("/", addresses.Nothing, lambda run, _: overview_page(run), "overview"),
    Page(f"/{DOCUMENTS}", addresses.Search, documents_page, "documents"),
    Page(f"/{DOCUMENTS}/{{id}}", addresses.OneDocument, document_page, "document"),
    Page(f"/{SEARCH_PAGE}", addresses.ByMeaning, search_page, "search"),
    Page(f"/{DOMAINS_PAGE}/{{stage}}", addresses.OneStage, domains_page, "domains"),
    Page(f"/{CUTS_PAGE}", addresses.Nothing, lambda run, _: cuts_page(run), "cuts"),
    Page(f"/{CUTS_PAGE}/{{key}}", addresses.OneCut, cut_page, "cut"),
    Page(f"/{CLUSTERS_PAGE}/{{step}}", addresses.Clusters, clusters_page, "clusters"),
    Page(f"/{CLUSTERS_PAGE}/{{step}}/{{cluster}}", addresses.OneCluster, cluster_page, "cluster"),
    Page(f"/{ROWS_PAGE}/{{stage}}", addresses.Rows, rows_page, "rows"),
    Page(f"/{ROWS_PAGE}/{{stage}}/{{row}}", addresses.OneRow, row_page, "row"),
    Page(f"/{TRAINING_PAGE}/{{stage}}", addresses.Training, training_page, "training"),
    Page(f"/{TRAINING_PAGE}/{{stage}}/{{step}}", addresses.OneStep, step_page, "step"),
    Page(f"/{EXAMPLES_PAGE}/{{id}}", addresses.OneDocument, example_page, "example"),
    Page("/find", addresses.Find, find, "error"),
)


def _refused(run: BrowsedRun, status: HTTPStatus, request: Request, error: Exception) -> Response:
    """A page with the sentence of an error."""
    titles = {
        HTTPStatus.BAD_REQUEST: "Not understood",
        HTTPStatus.NOT_FOUND: "Not found",
        HTTPStatus.INTERNAL_SERVER_ERROR: "Cannot be read",
    }
    said = mask_text(" ".join(str(error).split())) or type(error).__name__
    return _html(run, "error", {"title": titles.get(status, status.phrase), "said": said}, status)


def _no_page(run: BrowsedRun, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {
        HTTPStatus.NOT_FOUND: f"there is no page {request.url.path}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method} is not answered here: pages are read with GET, and "
        "nothing is changed",
    }.get(HTTPStatus(error.status_code), error.detail)
    title = "Not found" if error.status_code == HTTPStatus.NOT_FOUND else "Refused"
    return _html(run, "error", {"title": title, "said": said}, error.status_code)


def _failed(run: BrowsedRun, request: Request, error: Exception) -> Response:
    """A sentence about what nobody has thought of; the terminal gets the traceback."""
    said = mask_text(f"this page cannot be made: {type(error).__name__}: {error}")
    return _html(run, "error", {"title": "Cannot be shown", "said": said}, HTTPStatus.INTERNAL_SERVER_ERROR)


def _html(run: BrowsedRun, template: str, values: Mapping[str, Any], status: int = HTTPStatus.OK) -> Response:
    try:
        links = navigation(run)
    except DAMAGED:
        links = [("overview", "/")]
    text = templates().get_template(f"{template}.html.jinja").render(**values, run_name=run.name, navigation=links)
    return HTMLResponse(mask_known(text), status)


@cache
def templates() -> Environment:
    """The templates of the pages. They escape every value that they show."""
    found = environment(Path(__file__).parent / "templates")
    found.filters["number"] = number
    found.filters["json"] = partial(json.dumps, ensure_ascii=False)
    return found


def number(value: object) -> str:
    """A measured value as people read it."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(number, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@cache
def style_sheet(name: str = "browse.css.jinja", *folders: Path) -> str:
    """The style of all pages, light or dark as the browser is; or one of other folders, which may include it."""
    own, report = Path(__file__).parent / "templates", Path(__file__).parent.parent / "report" / "templates"
    return environment(*folders, own, report).get_template(name).render(light=LIGHT, dark=DARK, series=COLOURS)
