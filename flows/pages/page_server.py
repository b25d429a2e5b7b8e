"""A server of pages on the loopback address.

Pages show untrusted texts. Templates escape every value, a policy restricts browsers to
the style sheet of this server, and pages of other sites can neither frame nor read a
page: requests with another host, or from another site's page, are refused.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gristmill.flows.pages.access_token import AccessToken, SignIn
from gristmill.flows.pages.page_html import (
    HEADERS,
    STYLE,
    style_sheet,
)

LOOPBACK = "127.0.0.1"
HOSTS = [LOOPBACK, "localhost"]


class PortError(ValueError):
    """A port that cannot be listened on."""


def listen_locally(port: int) -> socket.socket:
    """A socket on a port of the loopback address; 0 takes a free one.

    Raises:
        PortError: the port is taken.
    """
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise PortError(
            f"cannot listen on port {port}: {error.strerror}; give another --port"
        ) from error


def serve_pages(app: GuardedApp, listening: socket.socket, purpose: str) -> None:
    """Print the address with a fresh token and the purpose of the pages; serve until
    Ctrl-C.
    """
    token = AccessToken.fresh(listening.getsockname()[1])
    print(f"{token.url(LOOPBACK)} {purpose}; Ctrl-C ends it", flush=True)
    serve(SignIn(app, token), listening)


def serve(app: SignIn, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; open requests have five seconds to finish."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=5
    )
    uvicorn.Server(config).run(sockets=[listening])


class GuardedApp:
    """The application that answers `routes`, whose answers have `HEADERS`, and which
    refuses requests of other sites' pages.

    Args:
        routes: addresses with the functions that answer them.
        handlers: class of an error -> its answer.
    """

    def __init__(self, routes: Sequence[Route], handlers: Mapping[Any, Any]) -> None:
        style = PlainTextResponse(style_sheet(), media_type="text/css")
        # Inside of this one: Starlette answers unexpected errors before its own
        # middleware.
        self._app = Starlette(
            routes=[*routes, Route(STYLE, lambda request: style, methods=["GET"])],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)],
            exception_handlers=handlers,
        )
        self._headers = [
            (name.encode(), value.encode()) for name, value in HEADERS.items()
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        request_headers = dict(scope.get("headers", ()))
        is_foreign = request_headers.get(b"sec-fetch-site") in (
            b"cross-site",
            b"same-site",
        )
        # Who follows a link from elsewhere sees the page; a page of another site cannot
        # load it into itself.
        if (
            scope["type"] == "http"
            and is_foreign
            and request_headers.get(b"sec-fetch-mode") != b"navigate"
        ):
            refusal = PlainTextResponse(
                "pages of other sites get nothing from here", HTTPStatus.FORBIDDEN
            )
            await refusal(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)
