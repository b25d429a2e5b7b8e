"""Access tokens of gristmill's servers, because every user of a machine can reach its
loopback address.

A server prints its address with a token. A browser that opens the address gets a
cookie, which scripts cannot read and other sites cannot send; other clients send the
token as `Authorization: Bearer TOKEN`. All other requests get a 403.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse

TOKEN_BYTES = 32
PARAMETER = "token"
REFUSAL = (
    "403: open the address with its token, as the server printed it when it started\n"
)


@dataclass(frozen=True)
class AccessToken:
    """Secret of one server.

    Attributes:
        value: the token.
        port: the server's port. It is part of the cookie's name, as browsers send
            cookies to every port of a host.
    """

    value: str
    port: int

    @classmethod
    def fresh(cls, port: int) -> AccessToken:
        """Generate a random token."""
        return cls(secrets.token_urlsafe(TOKEN_BYTES), port)

    @property
    def cookie(self) -> str:
        """Name of the cookie."""
        return f"gristmill-{self.port}"

    @property
    def set_cookie(self) -> str:
        """Value of the `Set-Cookie` header; the cookie lasts until the browser is
        closed.
        """
        return f"{self.cookie}={self.value}; Path=/; HttpOnly; SameSite=Strict"

    def url(self, host: str, path: str = "/") -> str:
        """Return an address of the server that signs in a browser."""
        return f"http://{host}:{self.port}{path}?{urlencode({PARAMETER: self.value})}"

    def admits(self, cookies: str, authorization: str) -> bool:
        """Return True if the header `Cookie` or `Authorization` of a request has the
        token.
        """
        scheme, _, credentials = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.matches(credentials.strip()):
            return True
        try:
            morsel = SimpleCookie(cookies).get(self.cookie)
        except CookieError:
            return False
        return morsel is not None and self.matches(morsel.value)

    def matches(self, text: str) -> bool:
        """Compare a text with the token in constant time."""
        return hmac.compare_digest(text.encode(errors="replace"), self.value.encode())

    def signed_in_path(self, path: str, query: str) -> str | None:
        """Return the path and query without the token, or None if the query does not
        have the right token.
        """
        parameters = QueryParams(query)
        if not any(map(self.matches, parameters.getlist(PARAMETER))):
            return None
        remaining = urlencode(
            [item for item in parameters.multi_items() if item[0] != PARAMETER]
        )
        # Browsers read two slashes, or a backslash, as the name of another host.
        local_path = "/" + path.lstrip("/\\")
        return f"{local_path}?{remaining}" if remaining else local_path


class SignIn:
    """ASGI application protected by an access token.

    Args:
        app: the application.
        token: the server's token.
    """

    def __init__(self, app: Any, token: AccessToken) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request, token, answer = HTTPConnection(scope), self._token, self._app
        credentials = (
            request.headers.get(name, "") for name in ("cookie", "authorization")
        )
        raw_path = scope["raw_path"].decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        path = token.signed_in_path(raw_path, query)
        if path is not None and scope.get("method") == "GET":
            headers = {
                "set-cookie": token.set_cookie,
                "referrer-policy": "no-referrer",
            }
            answer = RedirectResponse(path, HTTPStatus.SEE_OTHER, headers)
        elif not token.admits(*credentials):
            answer = PlainTextResponse(REFUSAL, HTTPStatus.FORBIDDEN)
        await answer(scope, receive, send)
