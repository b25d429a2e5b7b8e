"""What clients may take of a served model: bytes, requests, answers and time; what is beyond is refused in a sentence.

Everything a request is refused for here costs no tokenising and no forward pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from gristmill.flows.models.protocol import INVALID, failure, json_bytes
from gristmill.flows.models.server_metrics import ServerMetrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]
TAKEN = "gristmill.taken"
"""Under this name a request's scope has an ExitStack, which is closed when nobody answers it any more."""
DISCARDED_BYTES = 8 << 20
"""So much of a body that is too large is read and forgotten: a client that still sends hears no refusal."""
HEADER_SECONDS = 10.0
"""From the opening of a connection, or the first byte of its next request, to the end of the headers."""


@dataclass(frozen=True)
class Limits:
    """What is refused.

    Attributes:
        body_bytes: larger bodies, 413.
        prompt_characters_per_token: a conversation with more characters for each token that the model reads, 400
            before it is tokenised.
        answers: of all requests together, running or waiting; more are 429, and 400 where one request asks for them.
        requests: at the same time, from their headers to the end of their answer; more are 429.
        body_seconds: until a body is there; slower ones are 408.
        idle_seconds: a client that takes nothing of its answer for so long has gone.
    """

    body_bytes: int = 1 << 20
    prompt_characters_per_token: int = 32
    answers: int = 128
    requests: int = 256
    body_seconds: float = 30.0
    idle_seconds: float = 60.0


class TooManyError(Exception):
    """All places are taken; a client may ask again."""


class Places:
    """Places that are taken for a time, counted."""

    def __init__(self, most: int, what: str) -> None:
        self.most, self._what, self.taken = most, what, 0

    @contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        """Take places.

        Raises:
            TooManyError: so many are not free.
        """
        if self.taken + count > self.most:
            raise TooManyError(f"this server has {self.taken} of {self.most} {self._what} at work; ask again later")
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


class Guard:
    """The ASGI application behind the limits: it gets whole bodies, and ends with its client.

    Args:
        app: what answers.
        limits: see there.
        metrics: counts what is answered, and how.
    """

    def __init__(self, app: Asgi, limits: Limits, metrics: ServerMetrics) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
        self._places = Places(limits.requests, "requests")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        try:
            with self._places.take(), self._metrics.timed():
                await self._answer(scope, receive, counted)
        except TooManyError as error:
            await refuse(str(error), 429)(scope, receive, counted)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        limits = self._limits
        try:
            async with asyncio.timeout(limits.body_seconds):
                body = await _whole_body(scope, receive, limits.body_bytes)
        except TimeoutError:
            await refuse(f"the body of the request did not come within {limits.body_seconds:g} seconds", 408)(
                scope, receive, send
            )
            return
        if isinstance(body, int):
            await refuse(f"the body of the request has {body} bytes or more; the most is {limits.body_bytes}", 413)(
                scope, receive, send
            )
            return
        if body is not None:
            await self._until_gone(scope, body, receive, send)

    async def _until_gone(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """Let the application answer, and stop it when its client has gone, or takes nothing any more."""
        bodies = [body]
        gone = asyncio.create_task(_wait_until_gone(receive))

        async def given() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        async def sent(message: Message) -> None:
            async with asyncio.timeout(self._limits.idle_seconds):
                await send(message)

        with ExitStack() as taken:
            scope[TAKEN] = taken
            answer = asyncio.ensure_future(self._app(scope, given, sent))
            try:
                await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    answer.cancel()
                with suppress(asyncio.CancelledError, TimeoutError):
                    await answer
            finally:
                answer.cancel()
                gone.cancel()


async def _whole_body(scope: Message, receive: Receive, most: int) -> bytes | int | None:
    """The body; its size, or how much of it came, if it is too large; None where the client has gone."""
    announced = int(next((value for name, value in scope["headers"] if name == b"content-length"), b"0"))
    if announced > DISCARDED_BYTES:
        return announced
    body, came, more = bytearray(), 0, True
    while more and came <= DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        came += len(message.get("body", b""))
        body += message.get("body", b"") if max(announced, came) <= most else b""
        more = message.get("more_body", False)
    return bytes(body) if max(announced, came) <= most else max(announced, came)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refuse(message: str, status: int) -> Response:
    """A refusal of OpenAI's form, after which the connection is closed: what else comes on it is not read."""
    headers = {"connection": "close", **({"retry-after": "1"} if status == 429 else {})}
    return Response(json_bytes(failure(message, INVALID)), status, headers, "application/json")


class ImpatientProtocol(H11Protocol):
    """A connection that is closed if the headers of a request do not come in time; uvicorn waits for ever."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Take bytes, and see whether a request has begun with them."""
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
